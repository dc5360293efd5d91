"""A real prefill server, and what a Headrace decode peer gets of a prompt from it, to compare with."""

import time
from pathlib import Path

import numpy as np

from headrace.core.types.peers.allow_list import allowed_prefills
from headrace.engine.kv.memory_plan import stage_geometry
from headrace.engine.model.sharding import part_of
from headrace.engine.model.source import load_spec, resolve_source
from headrace.peer.commands import Loaded, LoadKv, ReleaseLoad, TicketRef
from headrace.peer.records import PeerLimits
from headrace.peer.staging import Staging
from headrace.peer.thread import PeerThread
from headrace.server.launch.free_port import free_port
from headrace.transfer.protocol.layout import Bytes
from tests.e2e.harness import Server
from tests.gateway.sglang_nixl.decode_engine import DecodeEngine

MODEL = "stub:layers=4,hidden=128,heads=8,kv_heads=4,vocab=1000,max_len=8192"
GEOMETRY = stage_geometry(part_of(load_spec(resolve_source(MODEL))), "float32", 1)
HOST = "127.0.0.1"
POISON = 0xEE  # all over the memory of decode engines before a test
FLAGS = ("--role", "prefill", "--model", MODEL, "--threads", "1", "--no-prefix-cache", "--drain-timeout", "1")


def limits(server: Server, pages: int, page_size: int) -> PeerLimits:
    return PeerLimits(
        fingerprint=server.get("/v1/handoff").json()["fingerprint"],
        rules=allowed_prefills((), (HOST,)),
        pages=pages,
        page_tokens=page_size,
    )


def bootstrap_port() -> int:
    """A free port for a gateway that is followed by another one, which the side channel takes."""
    port = free_port()
    while (following := free_port()) != port + 1:
        port = following
    return port


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng((seed, count)).integers(0, 1000, count)]


def untouched(one: DecodeEngine, pages: list[int], count: int) -> bool:
    """Whether nothing but the first tokens of these pages was written."""
    copy = one.kv.copy()
    flat = copy[:, :, pages].reshape(2, one.setup.layers, -1, one.setup.heads, one.setup.token_bytes)
    flat[:, :, :count] = POISON
    copy[:, :, pages] = flat.reshape(copy[:, :, pages].shape)
    return bool((copy == POISON).all())


def decode_engine(folder: Path, bootstrap_port: int, page_size: int, ranks: int = 1, rank: int = 0) -> DecodeEngine:
    """A scripted one with the model's shape, not registered yet."""
    setup = {
        "bootstrap": f"{HOST}:{bootstrap_port}",
        "layers": GEOMETRY.layers,
        "heads": GEOMETRY.kv_heads // ranks,
        "token_bytes": GEOMETRY.head_dim * GEOMETRY.item_bytes,
        "page_size": page_size,
        "pages": 4096 // page_size + 40,
        "tp_size": ranks,
        "tp_rank": rank,
    }
    made = DecodeEngine(folder, setup)
    made.memory[:] = POISON
    return made


class Reference:
    """A Headrace decode peer."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._staging = Staging(GEOMETRY, 4096)
        self._peer = PeerThread(limits(server, self._staging.pages, 64), self._staging, name="peer", max_model_len=4096)
        self._peer.start()

    def __call__(self, prompt: list[int]) -> tuple[Bytes, Loaded]:
        """The KV, [layers, K/V, heads, tokens, bytes], and the first token."""
        ticket = f"reference-{time.monotonic_ns()}"
        body = {"prompt_token_ids": prompt, "ticket": ticket, "handoff": "hold", "temperature": 0, "logprobs": 3}
        answer = self._server.post("/v1/prefill", body)
        assert answer.status_code == 200, answer.text
        place = TicketRef(name=ticket, host=HOST, port=self._server.port, http=True)
        self._peer.submit(LoadKv(id=ticket, ticket=place, start=0, tokens=len(prompt)))
        [loaded] = self._peer.results(20)
        assert isinstance(loaded, Loaded)
        found = self._staging.data[:, :, :, loaded.at : loaded.at + loaded.count].copy()
        self._peer.submit(ReleaseLoad(id=ticket))
        return found, loaded

    def close(self) -> None:
        self._peer.stop()


def arrived(one: DecodeEngine, pages: list[int], count: int) -> Bytes:
    """The first tokens of these pages: [layers, K/V, heads, tokens, bytes]."""
    kv = one.kv[:, :, pages].reshape(2, one.setup.layers, -1, one.setup.heads, one.setup.token_bytes)
    return kv[:, :, :count].transpose(1, 0, 3, 2, 4)
