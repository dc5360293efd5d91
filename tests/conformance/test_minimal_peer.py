"""examples/minimal_peer.py against a real prefill server: the same bytes as our own receiver gets."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from examples import minimal_peer
from headrace.core.messages.orders import OpenSession, PrepareReceive
from headrace.core.messages.peers import AskReserve, ConnectPrefill, PrefillUp
from headrace.core.messages.stage_events import KvReceived
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.reservation import Reservation
from headrace.transfer.control.client import ControlClient
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.protocol.matching import make_hello
from tests.e2e.harness import Server, serving
from tests.transfer.control.harness import CONFIG
from tests.transfer.harness import Loop, gather, random_store, zmq_context

PEER = Path(minimal_peer.__file__)
DTYPE = "float32"
GEOMETRY = Geometry(DTYPE, layers=4, kv_heads=1, head_dim=32, page_size=16)
PROMPT = [7 * i % 250 for i in range(1, 400)]


STATE = Component("state", "uint8", layers=4, kv_heads=1, head_dim=8, planes=1, per_request=True)
MODEL = "stub:layers=4,hidden=32"
FLAGS = ("--role", "prefill", "--dtype", DTYPE, "--chunk-tokens", "96")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*FLAGS, "--model", MODEL) as made:
        yield made


def prefill(server: Server, ticket: str, **fields: Any) -> Any:
    """Ask for the prompt's prefill under this ticket; returns the first token when the handoff has ended."""
    answer = server.post("/v1/prefill", {"prompt_token_ids": PROMPT, "ticket": ticket, "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["first_token"]["id"]


def with_our_own(server: Server, geometry: Geometry = GEOMETRY) -> tuple[int, str]:
    """First token and digest of the KV, and of states, as ControlClient and Receiver take it."""
    fingerprint = server.get("/v1/handoff").json()["fingerprint"]
    control_server = f"tcp://127.0.0.1:{server.get('/v1/handoff').json()['control_port']}"
    pages = list(range(40, 40 - geometry.pages_for(len(PROMPT)), -1))
    with zmq_context() as context:
        store = random_store(geometry, 64)
        control_client = ControlClient(CONFIG, context)
        receiver = Receiver(CONFIG, stage=0, geometry=geometry, store=store, context=context)
        loop = Loop(control_client, receiver)
        control_client.ready(
            make_hello(
                CONFIG,
                instance="d" * 32,
                name="ours",
                role="decode",
                fingerprint=fingerprint,
                geometries=(geometry,),
                kv_pages=64,
                max_model_len=4096,
                metadata_rows=8,
            )
        )
        loop.apply(control_client, ConnectPrefill(name="p", endpoint=control_server))
        up = loop.wait_for(control_client, PrefillUp)
        loop.apply(
            receiver,
            OpenSession(seq=0, terms=up.terms),
        )  # fmt: skip
        names: dict[str, Any] = {"ticket": "ours", "generation": 1, "pages": pack(pages), "row": 0}
        names["slot"] = 5 if geometry.state_bytes else -1
        loop.apply(receiver, PrepareReceive(seq=0, request=1, session=up.session, start=0, count=len(PROMPT), **names))
        reservation = Reservation(prompt_tokens=len(PROMPT), cached_tokens=0, **names)
        loop.apply(control_client, AskReserve(session=up.session, reservation=reservation))
        client = threading.Thread(target=prefill, args=(server, "ours"))
        client.start()
        arrived = loop.wait_for(receiver, KvReceived, timeout_s=30)
        tokens = gather(store, geometry, pages, 0, len(PROMPT))  # [tokens, layers, 2, heads, bytes]
        states = [store.tensors[part.name][5].tobytes() for part in geometry.components]
        client.join(30)
        loop.close()
    digest = hashlib.sha256(np.ascontiguousarray(np.moveaxis(tokens, 0, 3)))
    digest.update(b"".join(states))
    return arrived.first.token, digest.hexdigest()


def command(server: Server, ticket: str, *flags: str) -> "subprocess.Popen[str]":
    sizes = ("--tokens", str(len(PROMPT)), "--layers", "4", "--kv-heads", "1")
    line = [sys.executable, str(PEER), server.url, "--ticket", ticket, *sizes, *flags]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_takes_the_same_bytes_as_our_own_receiver(server: Server) -> None:
    peer = command(server, "minimal", "--head-dim", "32")
    token = prefill(server, "minimal")
    out, err = peer.communicate(timeout=60)
    assert peer.returncode == 0, err
    first, digest = with_our_own(server)
    assert (first, json.loads(out)) == (token, {"first_token": token, "sha256": digest})


def with_states(server: Server) -> tuple[int, Any]:
    """First token, and what the peer says of it and of the digest."""
    component = msgspec.json.encode({**msgspec.structs.asdict(STATE)}).decode()
    peer = command(server, "stateful", "--head-dim", "32", "--component", component)
    token = prefill(server, "stateful")
    out, err = peer.communicate(timeout=60)
    assert peer.returncode == 0, err
    return token, json.loads(out)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full)])
def test_states_come_with_the_last_chunk(stages: int) -> None:
    """Of two stages each has those of its layers."""
    with serving(*FLAGS, "--model", f"{MODEL},states=1") as made:
        found = [with_states(made)] if stages == 1 else []
        first, digest = with_our_own(made, replace(GEOMETRY, components=(STATE,)))
    if stages > 1:
        with serving(*FLAGS, "--model", f"{MODEL},states=1", "--pp", str(stages)) as made:
            found = [with_states(made)]
    assert found == [(first, {"first_token": first, "sha256": digest})]


def test_a_first_token_that_ends_the_request_brings_no_kv(server: Server) -> None:
    peer = command(server, "short", "--head-dim", "32")
    token = prefill(server, "short", max_tokens=1)
    out, err = peer.communicate(timeout=60)
    assert json.loads(out) == {"first_token": token, "sha256": None}, err


def test_a_refusal_names_both_values(server: Server) -> None:
    peer = command(server, "other", "--head-dim", "64")
    _, err = peer.communicate(timeout=60)
    ours, theirs = "32 at the prefill server (model stub:layers=4,hidden=32)", "64 at stage 0 of the decode server"
    assert (peer.returncode, err) == (1, f"head_dim_mismatch: head_dim: {ours}, {theirs}\n")


def test_it_stays_a_single_small_file() -> None:
    assert len(PEER.read_text().splitlines()) < 350


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
    | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=30,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=40), VALUES, max_size=5))
def test_its_decoder_reads_what_msgspec_writes(values: dict[str, Any]) -> None:
    message = {**values, "type": "Any"}
    assert minimal_peer.decode(msgspec.msgpack.encode(message)) == message


@given(st.binary(max_size=200))
def test_its_decoder_takes_any_bytes(data: bytes) -> None:
    assert isinstance(minimal_peer.decode(data), dict)
