"""Runner of the stub model: takes a configured time, and its tokens reveal any corrupted KV, hidden state or token.

The token sampled from a row follows from the state of its last position and from a digest of the states of all its
positions, read from the pages (states.py). So a wrong, stale or misplaced page, a lost hidden state, a token of
another row, or a head that is lost, doubled or at the wrong rank yields another token; chunking, batching, paging, the
pipeline split and tensor parallelism do not: integers add up to the same bits in any order.

    hidden state of a position:   [8 elements: bytes of its state][8 elements: bytes of the digest][zeros]

Every dtype of hidden states represents a byte exactly.
"""

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.core.runtime.progress import PassProgress
from headrace.core.types import packed
from headrace.core.types.ranks.coordinate import Agreement, halves
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.collectives.operations import ALONE, Collectives
from headrace.engine.collectives.steps import Steps, finish, take_turns
from headrace.engine.dtypes import TORCH_DTYPES
from headrace.engine.grammar.compiler import GrammarCompiler
from headrace.engine.kv.pool import Allocate, KVPool
from headrace.engine.layers.exchange import Exchange
from headrace.engine.layers.moe import ExpertRows
from headrace.engine.layers.vocabulary import Best, best_of
from headrace.engine.load_plan import LoadPlan
from headrace.engine.model.stub import END, parse_stub
from headrace.engine.row_sampler import FedTokens, PlanResult, RowSampler, Sampling, row_ids
from headrace.engine.runner import WARM_UP_REQUEST, HiddenSpec
from headrace.engine.stub.experts import StubExperts, StubTime, mixed
from headrace.engine.stub.states import StubStates, to_bytes, to_words

LONG_SLEEP_S = 0.5  # a longer one is taken in steps, one for each layer
CERTAIN = 40.0  # logit of the next token; all others are 0

DeviceFault = Literal["memory", "hang"]
# By what the second token of a prompt is above the first, which is --model stub:fault_token=N: the fault, and whether
# the first or the last stage has it.
_FAULTS: tuple[tuple[DeviceFault, bool], ...] = (("memory", True), ("memory", False), ("hang", True), ("hang", False))
_ASLEEP_S = 3600.0


def fault_in(rows: Sequence[PlanRow], token: int, first: bool, last: bool) -> DeviceFault | None:
    """The device fault that a forward pass is to have in a stage; None for most. token: as the model's name has it."""
    for row in rows if token else ():
        ids = packed.unpack(row.tokens)[:2].tolist() if row.start == 0 and row.count > 1 else []
        if len(ids) == 2 and ids[0] == token and 0 <= ids[1] - token < len(_FAULTS):
            fault, at_first = _FAULTS[ids[1] - token]
            if (at_first and first) or (not at_first and last):
                return fault
    return None


def have_fault(fault: DeviceFault | None) -> None:
    """Raise torch.OutOfMemoryError, as a device does, or never return."""
    if fault == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory (of the stub model, as its name asks for)")
    while fault == "hang":
        time.sleep(_ASLEEP_S)


class StubRunner:
    """A Runner for the layers of one stage of a stub model (engine/model/stub.py), or one shard of them."""

    same_bits = None
    reproducible = True

    def __init__(
        self,
        plan: LoadPlan,
        *,
        allocate: Allocate | None = None,
        exchanges: Sequence[Exchange] = (),
        tp: Collectives = ALONE,
        clock: StubTime | None = None,
    ) -> None:
        """Allocate the pool; there are no weights.

        allocate: see KVPool. exchanges: how ranks share experts, one for each half of passes that are cut; none where
        they share none, whose results are then not computed. tp: the shards of this stage.
        """
        (terms, part, memory), spec = plan, plan.part.spec
        layers, shard, (device, dtype, _) = part.layers, part.shard, terms.computation
        self._model = parse_stub(terms.model.model)
        self.fingerprint = self._model.fingerprint()
        self.adapters: Mapping[str, str] = {}
        self.vocab_size = spec.vocab_size
        self.hidden_spec = HiddenSpec(spec.hidden_size, TORCH_DTYPES[dtype], torch.device(device))
        self.geometry = plan.geometry
        self.pool = KVPool(self.geometry, memory.kv_pages, device, allocate)
        self.expert_rows: ExpertRows | None = None
        self.progress = PassProgress()
        self.cancels = tp.size == 1 and not exchanges
        """See Runner: others would wait for this rank."""
        self._first, self._last = part.first, part.last
        self._tp = tp
        self._share = len(layers) / spec.layers * len(shard.heads) / spec.heads
        self._states = StubStates(self.pool, layers, shard, spec.heads // spec.kv_heads, terms.length)
        self._random = random.Random(layers.start)
        compiler = partial(GrammarCompiler, terms.model.model, terms.engine.cache_dir, spec.vocab_size)
        # One shard has all logits, so that none is gathered.
        self._sampler = RowSampler(StubHead(spec.vocab_size), tp.rank, 1, compiler)
        self._overslept_s = 0.0  # by the last sleep
        self._clock = clock or StubTime()
        experts = StubExperts(spec.moe, exchanges, layers, self._clock) if spec.moe is not None and exchanges else None
        self._experts = experts

    def warm_up(self, most: int = 1) -> None:
        """See Runner. Runs one position, so that the code is loaded before the first plan."""
        row = PlanRow(WARM_UP_REQUEST, 0, 1, packed.pack([0]), packed.pack([0]), sample=SamplingParams(temperature=0.0))
        incoming = None if self._first else torch.zeros(1, self.hidden_spec.size, device=self.hidden_spec.device)
        self.sample([row], self.forward([row], incoming))
        self.release(WARM_UP_REQUEST)

    def execute(self, rows: Sequence[PlanRow]) -> PlanResult:
        """Forward pass and sampling, where this stage is the only one. Raises what forward() raises."""
        return self.sample(rows, self.forward(rows)).result()

    def feed(self, fed: FedTokens) -> None:
        """See Runner."""
        self._sampler.feed(fed)

    def release(self, request: int) -> None:
        """See Runner."""
        self._sampler.release(request)

    def join(self, agreement: Agreement) -> None:
        """See Runner. Without experts that are shared it takes the time of the replica that has most tokens, which this
        one waits for."""
        if self._experts is not None:
            self._clock.begin()
            self._experts.begin(agreement.tokens, agreement.padded)
            finish(self._experts.steps(torch.empty(0, dtype=torch.int64)))
            return
        model, started = self._model, time.perf_counter()
        self._sleep(started, max(agreement.tokens) * model.us_per_token + model.us_per_plan)

    def forward(
        self, rows: Sequence[PlanRow], hidden: Tensor | None = None, agreement: Agreement | None = None
    ) -> Tensor:
        """See Runner. Raises ValueError for a row whose tokens or pages do not cover its positions, IndexError for a
        page outside the pool."""
        started, count = time.perf_counter(), sum(row.count for row in rows)
        have_fault(fault_in(rows, self._model.fault_token, self._first, self._last))
        if self._last:
            self._sampler.begin(rows)
        result = torch.zeros(count, self.hidden_spec.size, dtype=self.hidden_spec.dtype, device=self.hidden_spec.device)
        incoming = None if hidden is None else to_words(hidden[:, :16])
        if self._experts is None:
            finish(self._steps(rows, incoming, result))
            self._take_time(started, rows)
            return result
        self._clock.begin()
        agreed = Agreement((count,)) if agreement is None else agreement
        self._experts.begin(agreed.tokens, agreed.padded or count, agreed.cut)
        if not agreed.cut:
            finish(self._steps(rows, incoming, result))
            return result
        parts = zip(_halves(rows, agreed.cut), (slice(0, agreed.cut), slice(agreed.cut, count)), strict=True)
        take_turns(
            self._steps(some, None if incoming is None else incoming[of], result[of], half)
            for half, (some, of) in enumerate(parts)
        )
        return result

    def _steps(self, rows: Sequence[PlanRow], incoming: Tensor | None, result: Tensor, half: int = 0) -> Steps[None]:
        """Compute hidden states [tokens, hidden size] of rows into result. incoming: states and digests of the previous
        stage, int64 [tokens, 2]."""
        ends = np.cumsum([row.count for row in rows]).tolist()
        states = []
        pages = [self._states.pages(row) for row in rows]
        gaps = [self._states.gap(row, page_ids) for row, page_ids in zip(rows, pages, strict=True)]
        for row, page_ids, gap, end in zip(rows, pages, gaps, ends, strict=True):
            if incoming is None:
                ids = row_ids(row, self._sampler.last(row.request))
                states.append(self._states.compute(row, page_ids, ids))
            else:
                states.append(incoming[end - row.count : end, 0])
            self._states.write(row, page_ids, states[-1])
            self._states.keep(row, states[-1][-1:] + gap)
        digests = [
            self._states.digests(row, page_ids) + gap for row, page_ids, gap in zip(rows, pages, gaps, strict=True)
        ]
        digest = self._tp.all_reduce(torch.cat(digests)).wait()
        if incoming is not None:
            digest = self._states.merge(incoming[:, 1], digest)
        if self._experts is not None:
            exchange_s = self._model.us_per_exchange * 1e-6 * self.geometry.layers / self._model.layers
            took = self._experts.steps(torch.cat(states), half, self._due_us(rows) * 1e-6 * self._share, exchange_s)
            digest = digest + (yield from took)
        result[:, :16] = to_bytes(torch.stack((torch.cat(states), digest), 1)).to(self.hidden_spec.dtype)

    def sample(self, rows: Sequence[PlanRow], hidden: Tensor) -> Sampling:
        """See Runner. Results are never nonfinite: all arithmetic is on integers."""
        return self._sampler.sample(rows, hidden)

    def _take_time(self, started: float, rows: Sequence[PlanRow]) -> None:
        """Sleep until the configured time since started has passed."""
        self._sleep(started, self._due_us(rows))

    def _due_us(self, rows: Sequence[PlanRow]) -> float:
        """Microseconds that all layers take for these rows, with the random deviation."""
        jitter = 1 + self._random.uniform(-1, 1) * self._model.jitter_percent / 100
        tokens = sum(row.count for row in rows)
        squared = sum(row.count * (2 * row.start + row.count) for row in rows)
        model = self._model
        due_us = tokens * model.us_per_token + squared * model.ps_per_token_squared * 1e-6 + model.us_per_plan
        return due_us * jitter

    def _sleep(self, started: float, due_us: float) -> None:
        """Sleep until this stage's share of so much time has passed since started. Oversleeping is subtracted from the
        next sleep."""
        due_s = due_us * 1e-6 * self._share
        until = started + due_s - self._overslept_s
        if (left := until - time.perf_counter()) > LONG_SLEEP_S:
            for _ in range(self.geometry.layers):
                self.progress.sleep(left / self.geometry.layers)
                self.progress.step()
        elif left > 0:
            self.progress.sleep(left)
        self.progress.step()
        self._overslept_s = min(max(0.0, time.perf_counter() - until), due_s)


class StubHead:
    """The Head of a stub model: one token is certain, and never END."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def logits(self, hidden: Tensor) -> Tensor:
        """See Head."""
        words = to_words(hidden[:, :16]).cpu().numpy().view(np.uint64)
        values = mixed(words[:, 0] ^ mixed(words[:, 1]))
        tokens = (values % np.uint64(self._vocab_size - 1)).astype(np.int64)
        tokens += tokens >= END
        logits = torch.zeros(len(tokens), self._vocab_size)
        logits[torch.arange(len(tokens)), torch.from_numpy(tokens)] = CERTAIN
        return logits

    def best(self, hidden: Tensor) -> Best:
        """See Head."""
        return best_of(self.logits(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """See Head. The states themselves."""
        return hidden


def _halves(rows: Sequence[PlanRow], cut: int) -> list[list[PlanRow]]:
    """The rows of the first cut tokens, and those of the rest. A row that samples does so in the half of its end."""
    parts = halves([row.count for row in rows], cut)
    return [[_part(rows[part.row], part.first, part.count) for part in half] for half in parts]


def _part(row: PlanRow, first: int, count: int) -> PlanRow:
    if count == row.count:
        return row
    tokens = packed.pack(packed.unpack(row.tokens)[first : first + count].tolist())
    return msgspec.structs.replace(row, start=row.start + first, count=count, tokens=tokens)
