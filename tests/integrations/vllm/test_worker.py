"""Worker, the connector's half in vLLM's worker, with scripted layers and a scripted peer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.runtime.clock import VirtualClock
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.requests.request import FirstToken
from headrace.integrations.vllm.model import cache_geometry, ordered_layers
from headrace.integrations.vllm.worker import IDLE_WAIT_S, WRITE_BUDGET_S, Worker
from headrace.peer.commands import (
    AnyCommand,
    AnyResult,
    CancelLoad,
    LoadCancelled,
    Loaded,
    LoadFailed,
    LoadKv,
    ReleaseLoad,
    TicketRef,
)
from headrace.peer.thread import PeerFailed

LAYERS, HEADS, DIM, BLOCK, BLOCKS, STAGED = 4, 2, 3, 8, 20, 64
TICKET = TicketRef(name="t", host="127.0.0.1", port=1)
FIRST = FirstToken(token=1, prompt_tokens=1, cached_tokens=0)


class Impl:
    """A cache update that can be checked slot by slot; each call takes some time."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def do_kv_cache_update(self, layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        assert slots.dtype == torch.int64
        assert keys.shape == values.shape == (len(slots), HEADS, DIM)
        for token, slot in enumerate(slots.tolist()):
            cache[slot // BLOCK, :, slot % BLOCK, :DIM] = keys[token]
            cache[slot // BLOCK, :, slot % BLOCK, DIM:] = values[token]
        self.clock.advance(self.seconds)


class Layer:
    num_kv_heads, head_size, head_size_v = HEADS, DIM, DIM

    def __init__(self, impl: Impl) -> None:
        self.impl = impl


class Peer:
    """Records commands and returns scripted results."""

    def __init__(self) -> None:
        self.told: list[AnyCommand] = []
        self.says: list[AnyResult] = []
        self.dead = False
        self.waits: list[float] = []

    def submit(self, *commands: AnyCommand) -> None:
        self.told += commands

    def results(self, wait_s: float = 0.0) -> list[AnyResult]:
        self.waits.append(wait_s)
        said, self.says = self.says, []
        if self.dead and not said:
            raise PeerFailed("gone")
        return said


class World:
    def __init__(self, seconds: float = 0.0) -> None:
        self.peer, self.clock = Peer(), VirtualClock()
        self.layers = [
            (Layer(Impl(self.clock, seconds)), torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)) for _ in range(LAYERS)
        ]
        self.staged = torch.randn(LAYERS, 2, HEADS, STAGED, DIM)
        self.worker = Worker(self.peer, self.layers, self.staged, BLOCK, self.clock)

    def load(self, name: str, start: int, tokens: int, blocks: tuple[int, ...]) -> None:
        self.worker.submit((LoadKv(id=name, ticket=TICKET, start=start, tokens=tokens),), {name: blocks})

    def loaded(self, name: str, at: int, start: int, count: int) -> None:
        self.peer.says.append(Loaded(id=name, at=at, start=start, count=count, first=FIRST, seconds=0.1))

    def advance(self) -> tuple[set[str], set[str]]:
        return self.worker.poll()

    def caches(self) -> Tensor:
        return torch.stack([cache for _, cache in self.layers])


@pytest.mark.parametrize(("start", "tokens", "at"), [(0, 1, 0), (0, 8, 5), (0, 17, 40), (8, 17, 3), (7, 30, 20)])
def test_every_token_goes_to_its_slot_and_to_no_other(start: int, tokens: int, at: int) -> None:
    world = World()
    blocks = (13, 4, 9, 2)
    world.load("a", start, tokens, blocks)
    world.loaded("a", at, start, tokens - start)
    assert world.advance() == ({"a"}, set())
    expected = torch.zeros(LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM)
    for layer in range(LAYERS):
        for position in range(start, tokens):
            keys, values = world.staged[layer, :, :, at + position - start]
            expected[layer, blocks[position // BLOCK], :, position % BLOCK] = torch.cat([keys, values], dim=-1)
    assert torch.equal(world.caches(), expected)
    assert world.peer.told[-1] == ReleaseLoad(id="a")
    assert world.advance() == (set(), set())
    assert len(world.worker) == 0


def test_a_step_writes_for_a_limited_time_and_the_next_one_goes_on() -> None:
    world = World(seconds=0.6 * WRITE_BUDGET_S)
    for name, block in (("a", 1), ("b", 2)):
        world.load(name, 0, 8, (block,))
        world.loaded(name, 8 * block, 0, 8)
    seen = [world.advance()[0] for _ in range(4)]
    assert seen == [set(), {"a"}, set(), {"b"}]


def test_a_step_waits_for_the_peer_only_if_it_has_nothing_else_to_do() -> None:
    world = World(seconds=WRITE_BUDGET_S)
    world.worker.poll(idle=True)
    world.load("a", 0, 8, (1,))
    world.worker.poll()
    world.worker.poll(idle=True)
    assert world.peer.waits == [0.0, 0.0, IDLE_WAIT_S], "a load is open and nothing is computed"
    world.loaded("a", 0, 0, 8)
    for _ in range(LAYERS):
        world.worker.poll(idle=True)
    assert world.peer.waits[4:] == [0.0] * (LAYERS - 1), "there is something to write"


def test_a_failed_load_is_reported_once_and_writes_nothing() -> None:
    world = World()
    world.load("a", 0, 8, (1,))
    world.peer.says += [LoadFailed(id="a", code="x", message="y"), LoadFailed(id="a", code="x", message="y")]
    assert world.advance() == ({"a"}, {"a"})
    assert world.advance() == (set(), set())
    assert not world.caches().any()


@pytest.mark.parametrize("arrived", [False, True])
def test_after_a_cancel_was_answered_nothing_is_written(arrived: bool) -> None:
    """vLLM gives the blocks to others as soon as it hears that the load is finished."""
    world = World()
    world.load("a", 0, 8, (1,))
    if arrived:  # on its way here when the cancel goes out
        world.loaded("a", 0, 0, 8)
    world.worker.submit((CancelLoad(id="a"),), {})
    if not arrived:
        assert world.advance() == (set(), set()), "not before the peer has answered"
        world.peer.says.append(LoadCancelled(id="a"))
    assert world.advance() == ({"a"}, set())
    world.loaded("a", 0, 0, 8)
    assert world.advance() == (set(), set())
    assert not world.caches().any()
    assert (ReleaseLoad(id="a") in world.peer.told) == arrived or world.peer.told[-1] == ReleaseLoad(id="a")


def test_a_cancel_in_the_middle_of_writing() -> None:
    world = World(seconds=WRITE_BUDGET_S)
    world.load("a", 0, 8, (1,))
    world.loaded("a", 0, 0, 8)
    assert world.advance() == (set(), set())
    world.worker.submit((CancelLoad(id="a"),), {})
    assert world.advance() == ({"a"}, set())
    before = world.caches().clone()
    assert world.advance() == (set(), set())
    assert torch.equal(world.caches(), before)


def test_a_cancel_of_what_is_finished_is_no_second_report() -> None:
    world = World()
    world.load("a", 0, 8, (1,))
    world.loaded("a", 0, 0, 8)
    assert world.advance() == ({"a"}, set())
    world.worker.submit((CancelLoad(id="a"),), {})
    world.peer.says.append(LoadCancelled(id="a"))
    assert world.advance() == (set(), set())


def test_when_the_peer_has_ended_every_load_fails() -> None:
    world = World()
    world.load("a", 0, 8, (1,))
    world.peer.dead = True
    assert world.advance() == ({"a"}, {"a"})
    world.load("b", 0, 8, (1,))
    assert world.advance() == ({"b"}, {"b"})


def caches(*names: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layers = {name: Layer(Impl(VirtualClock(), 0.0)) for name in names}
    return layers, {name: torch.zeros(2, HEADS, BLOCK, 2 * DIM, dtype=dtype) for name in names}


def test_layers_come_in_their_order_whatever_the_order_of_their_names() -> None:
    names = [f"model.layers.{number}.self_attn.attn" for number in (10, 2, 0, 1, 3, 9, 8, 7, 6, 5, 4)]
    layers, tensors = caches(*names, dtype=torch.bfloat16)
    ordered = ordered_layers(layers, tensors)
    assert [layer for layer, _ in ordered] == [layers[f"model.layers.{n}.self_attn.attn"] for n in range(11)]
    assert cache_geometry(ordered) == Geometry("bfloat16", 11, HEADS, DIM, 1)


@pytest.mark.parametrize(
    ("names", "words"),
    [(("a.0.x", "a.0.y"), "one attention per layer"), (("x",), "one attention"), (("a.1.x",), "pipeline stages")],
)
def test_models_that_cannot_be_filled_are_refused_by_name(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ordered_layers(*caches(*names))


def test_a_cache_that_is_no_plain_one_is_refused() -> None:
    layers, tensors = caches("a.0.x", dtype=torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        cache_geometry(ordered_layers(layers, tensors))
    layers, tensors = caches("a.0.x")
    layers["a.0.x"].kv_lora_rank = 512
    with pytest.raises(ConfigError, match="latent attention"):
        cache_geometry(ordered_layers(layers, tensors))
    layers, tensors = caches("a.0.x", "a.1.x")
    layers["a.1.x"].num_kv_heads = 7
    with pytest.raises(ConfigError, match="differ"):
        cache_geometry(ordered_layers(layers, tensors))
