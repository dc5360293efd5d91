"""Decode sides under test, each told where a prefill server is and what to fetch from it."""

import hashlib
import json
import secrets
import shlex
import subprocess
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import numpy as np
from msgspec.structs import replace

from examples import minimal_peer
from headrace.core.config import TransferConfig
from headrace.core.messages.orders import OpenSession, PrepareReceive
from headrace.core.messages.peers import (
    AskReserve,
    ConnectPrefill,
    PrefillDown,
    PrefillUp,
    TicketFailed,
    TicketFinished,
)
from headrace.core.messages.stage_events import KvReceived, ReceiveFailed
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import FirstToken
from headrace.core.types.requests.reservation import Reservation
from headrace.transfer.backends.strided_pool import StridedPool
from headrace.transfer.control.client import ControlClient
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.protocol.matching import make_hello
from tests.conformance.scripted import HEAD_DIM, HEADS, LATENT, LAYERS, PAGE, TICKET, TOKENS
from tests.transfer.harness import Loop, gather, random_store, zmq_context

GEOMETRY = Geometry("float32", LAYERS, HEADS, HEAD_DIM, PAGE)


WITH_LATENT = replace(GEOMETRY, components=(Component(**LATENT),))


class Result(NamedTuple):
    """What the peer got: first token and SHA-256 of the KV (None: no KV), components after it, or why it failed."""

    token: int | None = None
    sha256: str | None = None
    failure: str = ""


Peer = Callable[[str], Result]  # by the URL of the prefill server


class Running:
    """A peer at work on a thread."""

    def __init__(self, peer: Peer, url: str) -> None:
        self._results: list[Result] = []
        self._thread = threading.Thread(target=lambda: self._results.append(peer(url)))
        self._thread.start()

    def result(self) -> Result:
        self._thread.join(40)
        assert self._results, "the peer came to no end"
        return self._results[0]


def command(line: str, latent: bool = False) -> Peer:
    """A program with the flags of examples/minimal_peer.py, which prints what that prints. latent: it is told of the
    component, as its map in JSON, by --component."""

    def run(url: str) -> Result:
        sizes = {"tokens": TOKENS, "layers": LAYERS, "kv-heads": HEADS, "head-dim": HEAD_DIM}
        flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        if latent:
            flags += ["--component", json.dumps(LATENT)]
        done = subprocess.run(
            [*shlex.split(line), url, "--ticket", TICKET, *flags], capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            return Result(failure=done.stderr or "no reason given")
        found = json.loads(done.stdout)
        return Result(found["first_token"], found["sha256"])

    return run


def minimal(url: str) -> Result:
    """examples/minimal_peer.py, in this process."""
    about = httpx.get(f"{url}/v1/handoff").json()
    shape = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
    try:
        with zmq_context() as context:
            peer = minimal_peer.Peer(context, f"127.0.0.1:{about['control_port']}", about["fingerprint"], shape, 5.0)
            first, arrays = peer.fetch(TICKET, TOKENS)
            peer.close()
    except minimal_peer.Failure as error:
        return Result(failure=str(error))
    return Result(first, None if arrays is None else hashlib.sha256(b"".join(arrays.values())).hexdigest())


def ours(url: str, geometry: Geometry = GEOMETRY) -> Result:
    """ControlClient and Receiver. Like every user of them it takes a request for failed by the first event that says
    so."""
    about = httpx.get(f"{url}/v1/handoff").json()
    config = TransferConfig(peer_timeout_s=5.0)
    with zmq_context() as context:
        store = random_store(geometry, 16)
        control_client = ControlClient(config, context)
        receiver = Receiver(config, stage=0, geometry=geometry, store=store, context=context)
        loop = Loop(control_client, receiver)
        try:
            return _fetch(loop, control_client, receiver, store, geometry, about)
        finally:
            loop.close()


def ours_with_a_latent(url: str) -> Result:
    """The same with a component in its pool."""
    return ours(url, WITH_LATENT)


def _fetch(
    loop: Loop,
    control_client: ControlClient,
    receiver: Receiver,
    store: StridedPool,
    geometry: Geometry,
    about: dict[str, Any],
) -> Result:
    control_client.ready(
        make_hello(
            TransferConfig(peer_timeout_s=5.0), instance=secrets.token_hex(16), name="ours", role="decode",
            fingerprint=about["fingerprint"], geometries=(geometry,), kv_pages=16, max_model_len=256, metadata_rows=4,
        )
    )  # fmt: skip
    loop.apply(control_client, ConnectPrefill(name="p", endpoint=f"tcp://127.0.0.1:{about['control_port']}"))
    loop.until(lambda: loop.of(control_client, PrefillUp) or _down(loop, control_client), 20)
    if not loop.of(control_client, PrefillUp):
        return Result(failure=loop.of(control_client, PrefillDown)[-1].reason)
    up = loop.of(control_client, PrefillUp)[0]
    loop.apply(receiver, OpenSession(seq=0, terms=up.terms))
    pages = [9, 3, 12]
    names: dict[str, Any] = {"ticket": TICKET, "generation": 5, "pages": pack(pages), "row": 2}
    loop.apply(receiver, PrepareReceive(seq=0, request=1, session=up.session, start=0, count=TOKENS, **names))
    reservation = Reservation(prompt_tokens=TOKENS, cached_tokens=0, **names)
    loop.apply(control_client, AskReserve(session=up.session, reservation=reservation))
    failures = (TicketFailed, PrefillDown)
    loop.until(
        lambda: (
            loop.of(receiver, KvReceived)
            or loop.of(receiver, ReceiveFailed)
            or any(loop.of(control_client, kind) for kind in (*failures, TicketFinished))
        ),
        30,
    )
    for _ in range(5):
        loop.turn(0.01)  # what is on its way out
    if arrived := loop.of(receiver, KvReceived):
        found = hashlib.sha256()
        for name in store.tensors:
            found.update(np.ascontiguousarray(np.moveaxis(gather(store, geometry, pages, 0, TOKENS, name), 0, 3)))
        return Result(arrived[0].first.token, found.hexdigest())
    if finished := loop.of(control_client, TicketFinished):
        first: FirstToken = finished[0].first
        return Result(first.token)
    return Result(failure=_why(loop, control_client, receiver))


def _down(loop: Loop, control_client: ControlClient) -> bool:
    """It was refused for good, or is not answered."""
    lasting = [event for event in loop.of(control_client, PrefillDown) if not event.reason.startswith("not_ready")]
    return bool(lasting)


def _why(loop: Loop, control_client: ControlClient, receiver: Receiver) -> str:
    if bad := loop.of(receiver, ReceiveFailed):
        return f"{bad[0].code}: {bad[0].message}"
    if failed := loop.of(control_client, TicketFailed):
        return f"{failed[0].error.code}: {failed[0].error.message}"
    return loop.of(control_client, PrefillDown)[-1].reason
