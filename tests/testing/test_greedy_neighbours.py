"""A tenant or a peer that takes all it can, in virtual time: what an honest one notices of it.

The honest one sends prompts of four chunks at random times, a quarter of what the server can compute; the greedy one
begins before, and asks for three times as much as it can. An honest prompt may have to wait for the pass that is being
computed, and for nothing else.
"""

import random
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Order, SendChunk
from headrace.core.messages.peers import PeerJoined, PeerReserved, TellFailed
from headrace.core.messages.replies import RequestFailed, Tokens
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import ITEM_BYTES, pack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.core.types.requests.request import SamplingParams, SendTo
from headrace.core.types.requests.reservation import Reservation
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.scheduler.twin.pipeline import TimedHostTier, TimedPipeline
from headrace.testing.world import SchedulerDriver, World

COST: Cost = (0.0, 1e-4, 0.002)  # 0.1 ms a token, 2 ms a pass
PAGE = 16
BEGIN_S, END_S = 12.0, 60.0
PROMPT = 2048
CONFIG = SchedulerConfig(
    page_size=PAGE,
    kv_pages=2048,
    max_model_len=16384,
    chunk_tokens=512,
    max_queued_requests=512,
    max_queued_tokens=65536,
)
ALLOWED = 1.5


class Arrival(NamedTuple):
    """A prompt."""

    at: float
    tokens: int
    owner: str


def arrivals(owner: str, per_s: float, tokens: Sequence[int], begin_s: float) -> list[Arrival]:
    rng, at, found = random.Random(owner), begin_s, []
    while (at := at + rng.expovariate(per_s)) < END_S - 5:
        found.append(Arrival(at, rng.choice(tokens), owner))
    return found


class SlowPeers(TimedPipeline):
    """Peers by session: those of the greedy one acknowledge a chunk just before it would be taken for gone."""

    def _send(self, order: SendChunk) -> None:
        if order.session == "greedy":
            self._world.at(self._world.now + 0.9 * CONFIG.transfer_timeout_s, lambda: self._acknowledge(order))
        else:
            super()._send(order)


class Server:
    """One prefill server with two peers; each prompt goes to the peer of its owner."""

    def __init__(
        self,
        config: SchedulerConfig = CONFIG,
        pipeline: type[TimedPipeline] = TimedPipeline,
        salt_of: Callable[[int], str | None] = lambda _number: None,
    ) -> None:
        """salt_of: the cache salt of a prompt of the greedy one, who then has no key; None if it has one."""
        self.salt_of = salt_of
        self.world = World(0)
        self.scheduler = Scheduler(config)
        self.driver = SchedulerDriver(self.world, self.scheduler, self._perform)
        tier = TimedHostTier(self.world, 1, PAGE, None, self.driver.handle)
        self.pipeline = pipeline(self.world, (COST,), None, tier, self.driver.handle)
        self.pipeline.start(config.kv_pages, PAGE, 0)
        self.arrived: dict[str, Arrival] = {}
        self.times: dict[str, list[float]] = {"honest": [], "greedy": []}
        self.refused = {"honest": 0, "greedy": 0}
        for owner in self.times:
            pools = (Geometry("float32", 1, 1, 1, PAGE),)
            self.driver.handle(
                PeerJoined(name=owner, terms=PeerTerms(session=owner, geometries=pools, window_bytes=1 << 30))
            )

    def run(self, prompts: Sequence[Arrival]) -> "Server":
        for number, prompt in enumerate(prompts):
            self.world.at(prompt.at, lambda number=number, prompt=prompt: self.submit(number, prompt))  # type: ignore[misc]
        while self.world.now < END_S and self.world.step():
            pass
        return self

    def submit(self, number: int, prompt: Arrival) -> None:
        """The prompt, and the reservation of its peer."""
        rid = f"{prompt.owner} {number}"
        self.arrived[rid] = prompt
        self.reserve(prompt.owner, rid, prompt.tokens)
        tokens = number.to_bytes(ITEM_BYTES, "little") + bytes(ITEM_BYTES * (prompt.tokens - 1))
        submit = Submit(rid=rid, prompt=tokens, sampling=SamplingParams(max_tokens=2), route=SendTo(rid))
        salt = None if prompt.owner == "honest" else self.salt_of(number)
        terms = RequestTerms(tenant=prompt.owner) if salt is None else RequestTerms(cache_salt=salt)
        self.driver.handle(replace(submit, terms=terms))

    def reserve(self, owner: str, ticket: str, tokens: int) -> None:
        pages = pack(range(-(-tokens // PAGE)))
        self.driver.handle(
            PeerReserved(
                session=owner,
                reservation=Reservation(
                    ticket=ticket, generation=1, prompt_tokens=tokens, cached_tokens=0, pages=pages, row=0
                ),
            )
        )

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Order():
                    self.pipeline.order(effect)
                case Tokens():
                    prompt = self.arrived[effect.rid]
                    self.times[prompt.owner].append(self.world.now - prompt.at)
                case RequestFailed():
                    self.refused[self.arrived[effect.rid].owner] += 1
                case TellFailed(session=session) if effect.ticket not in self.arrived:
                    self.refused[session] += 1
                case _:
                    pass

    def p99(self, owner: str = "honest") -> float:
        return quantiles(self.times[owner], n=100)[98]


HONEST = arrivals("honest", 1.2, [PROMPT], BEGIN_S)


@pytest.fixture(scope="module")
def alone() -> float:
    return Server().run(HONEST).p99()


def compare(server: Server, alone: float) -> None:
    assert (server.refused["honest"], len(server.times["honest"])) == (0, len(HONEST))
    assert server.p99() <= ALLOWED * alone, f"{server.p99():.3f} s beside {alone:.3f} s"


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "sizes",
    [pytest.param([100], marks=FULL), [1000], pytest.param([8000], marks=FULL), [100, 1000, 8000]],
    ids=["short", "half as long", "long", "all lengths"],
)
def test_a_tenant_that_sends_three_times_what_can_be_computed(sizes: list[int], alone: float) -> None:
    greedy = arrivals("greedy", 3e4 * len(sizes) / sum(sizes), sizes, 0.0)
    server = Server().run([*greedy, *HONEST])
    compare(server, alone)
    assert server.refused["greedy"] > 10
    assert len(server.times["greedy"]) > 10, "it has the rest"


@pytest.mark.parametrize(
    "salt_of", [str, lambda _number: "honest"], ids=["one for each prompt", "the honest one's name"]
)
def test_a_client_without_a_key_that_chooses_cache_salts(salt_of: Callable[[int], str], alone: float) -> None:
    greedy = arrivals("greedy", 30, [1000], 0.0)
    server = Server(salt_of=salt_of).run([*greedy, *HONEST])
    compare(server, alone)
    assert len(server.times["greedy"]) > 10, "it has the rest"


def test_a_peer_that_acknowledges_as_slowly_as_it_may(alone: float) -> None:
    """Its prompts are longer than the honest ones: it is the pages that these could lack, not the time."""
    greedy = arrivals("greedy", 8, [4000], 0.0)
    compare(Server(pipeline=SlowPeers).run([*greedy, *HONEST]), alone)


def test_a_peer_that_reserves_without_end(alone: float) -> None:
    server = Server()

    def again(number: int) -> None:
        for ticket in range(number, number + 100):
            server.reserve("greedy", f"nothing {ticket}", 16)
        server.world.at(server.world.now + 0.5, lambda: again(number + 100))

    server.world.at(0.0, lambda: again(0))
    compare(server.run(HONEST), alone)
    assert server.refused["greedy"] > 1000
