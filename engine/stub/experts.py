"""Experts of the stub model: they go through the exchanges of real models, and take a set time that burns nothing.

The row of a position is eight bytes that follow from its state and the layer. An expert's result for it is eight other
bytes, times the small integer that is its weight, so that sums in float32 are exact in any order. Each rank knows what
the sum has to be: a row that is lost, doubled, stale or computed by another expert makes a difference, and so another
token.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.collectives.steps import Steps
from headrace.engine.layers.exchange import Exchange, begin_pass
from headrace.engine.model.expert_choice import ExpertChoice
from headrace.engine.model.expert_plan import TILE_TOKENS
from headrace.engine.model.moe_spec import MoeSpec

ROW = 8  # bytes of a row, an element each


class StubTime:
    """The set times of one rank. Its thread sleeps while it computes or waits; what is sent travels meanwhile, one
    transfer after another. Oversleeping is subtracted from later sleeps."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._at = 0.0  # where this rank would be without delays, in seconds of now()
        self._sent = 0.0  # when the last transfer is over

    def begin(self) -> None:
        """A forward pass begins. What the last one overslept was subtracted, or is forgotten."""
        self._at = self._now()

    def compute(self, seconds: float) -> None:
        """Sleep for so long."""
        self._until(self._at + seconds)

    def send(self, seconds: float) -> float:
        """Begin a transfer of so long. Returns when it is over."""
        self._sent = max(self._at, self._sent) + seconds
        return self._sent

    def wait(self, until: float) -> None:
        """Sleep until then."""
        self._until(max(self._at, until))

    def _until(self, at: float) -> None:
        self._at = at
        if (left := at - self._now()) > 0:
            self._sleep(left)


class StubExperts:
    """The experts of a stage's layers on one rank, and the exchange of rows for them."""

    def __init__(self, moe: MoeSpec, exchanges: Sequence[Exchange], layers: range, clock: StubTime) -> None:
        """exchanges: one for each half of passes that are cut."""
        self._moe = moe
        self._exchanges = exchanges
        self._layers = layers
        self._clock = clock
        self._longest = 0  # tokens of a pass of any replica, or of a half
        self._deviation = 0  # of all sums so far from what they had to be

    def begin(self, tokens: Sequence[int], padded: int, cut: int = 0) -> None:
        """See begin_pass()."""
        self._longest = max(*tokens, padded) - cut
        begin_pass(self._exchanges, tokens, padded, cut)

    def steps(self, states: Tensor, half: int = 0, compute_s: float = 0.0, exchange_s: float = 0.0) -> Steps[int]:
        """Run all layers for positions with these states, int64 [positions].

        compute_s: that attention and experts of all layers take, half of it each. exchange_s: that all layers'
        exchanges take per token. Returns 0 where all results of all passes were right, in 64 bits.
        """
        tiles = -(-self._longest // TILE_TOKENS)
        layer_s, travel_s = compute_s / len(self._layers), exchange_s * self._longest / len(self._layers)
        for layer in self._layers:
            self._clock.compute(layer_s / 2)
            words = mixed(states.cpu().numpy().view(np.uint64) + np.uint64(layer))
            rows = torch.from_numpy(words.view(np.uint8).reshape(-1, ROW)).float().to(states.device)
            mixture = StubMixture(self._moe, self._exchanges[half].own, self._clock, layer_s / 2 / tiles)
            found = yield from self._travel(self._exchanges[half].run(rows, mixture), travel_s / 2 / tiles)
            expected = mixture.sums(rows, mixture.route(rows), range(self._moe.experts))
            wrong = (found != expected).nonzero()
            for position, element in wrong.tolist():
                self._deviation = (self._deviation * 31 + position * ROW + element + 1) % (1 << 63)
        return self._deviation

    def _travel(self, exchange: Steps[Tensor], seconds: float) -> Steps[Tensor]:
        """An exchange each of whose transfers takes so long."""
        while True:
            try:
                next(exchange)
            except StopIteration as ended:
                result: Tensor = ended.value
                return result
            over = self._clock.send(seconds)
            yield
            self._clock.wait(over)


class StubMixture:
    """A Mixture whose results are small integers. Rows are bytes, as float32 [rows, ROW]."""

    grouped = joined = False

    def __init__(self, moe: MoeSpec, own: range, clock: StubTime, seconds: float) -> None:
        """own: experts of this rank. seconds: that they take for a tile."""
        self._moe = moe
        self._own = own
        self._clock = clock
        self._seconds = seconds

    def route(self, x: Tensor, shared: slice | None = None) -> ExpertChoice:
        """See Mixture."""
        first = _words(x) % np.uint64(self._moe.experts)
        order = np.arange(self._moe.top_k)
        chosen = (first.astype(np.int64)[:, None] + order) % self._moe.experts
        weights = np.broadcast_to(1 + order, chosen.shape).astype(np.float32)
        return ExpertChoice(torch.from_numpy(chosen).to(x.device), torch.from_numpy(weights).to(x.device))

    def compute(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """See Mixture."""
        self._clock.compute(self._seconds)
        return self.sums(x, choice, self._own)

    def shared(self, x: Tensor) -> None:
        """See Mixture. There are none."""

    def sums(self, x: Tensor, choice: ExpertChoice, held: range) -> Tensor:
        """Weighted sums over those of the chosen experts that are held: float32 [rows, ROW]."""
        experts, weights = choice.experts.cpu().numpy(), choice.weights.cpu().numpy()
        words = mixed(_words(x)[:, None] + (experts.astype(np.uint64) << np.uint64(32)))  # [rows, k]
        results = words.view(np.uint8).reshape(*experts.shape, ROW).astype(np.float32)
        mine = (experts >= held.start) & (experts < held.stop)
        sums = (results * (weights * mine)[..., None]).sum(1, dtype=np.float32)
        return torch.from_numpy(sums).to(x.device)


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output function of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), element
    by element."""
    values = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _words(x: Tensor) -> NDArray[np.uint64]:
    """Rows of bytes as numbers: uint64 [rows]."""
    return x.to(torch.uint8).contiguous().cpu().numpy().view(np.uint64).reshape(-1)
