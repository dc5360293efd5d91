"""Data-parallel replicas of a prefill server in the handshake, and in a decode stage's table."""

from typing import Any

import msgspec
import pytest

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import PrepareReceive
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import FirstToken
from headrace.transfer.data.inbound import AcceptChunk, InboundTable, RejectChunk, RepeatChunk
from headrace.transfer.protocol import metadata
from headrace.transfer.protocol.matching import BackendOffer, check_hello, check_welcome, make_hello
from headrace.transfer.protocol.messages import Chunk, Hello, StageInfo, Welcome

WHOLE = Geometry("float32", 4, 2, 8, 16)
UPPER, LOWER = Geometry("float32", 2, 2, 8, 16), Geometry("float32", 2, 2, 8, 16, layer_start=2)
FIRST = FirstToken(7, 16, 0)


def offer(*geometries: Geometry, replicas: tuple[int, ...] = ()) -> BackendOffer:
    return BackendOffer(
        instance="1" * 32,
        fingerprint="f",
        geometries=geometries,
        data_ports=tuple(range(1, 1 + len(geometries))),
        max_model_len=64,
        replicas=replicas,
    )


def hello(*geometries: Geometry) -> Hello:
    return make_hello(
        TransferConfig(),
        instance="2" * 32,
        name="peer",
        role="decode",
        fingerprint="f",
        geometries=geometries or (WHOLE,),
        kv_pages=8,
        max_model_len=64,
        metadata_rows=4,
    )


def welcome(stages: tuple[StageInfo, ...]) -> Welcome:
    return Welcome(
        protocol=1,
        session="3" * 32,
        instance="1" * 32,
        fingerprint="f",
        stages=stages,
        max_model_len=64,
        max_tickets=1,
        window_bytes=1,
        checksum=hello().checksums[0],
        backend="zmq",
        heartbeat_s=1,
        timeout_s=3,
    )


def test_stages_say_their_replica() -> None:
    stages = offer(UPPER, UPPER, LOWER, LOWER, replicas=(0, 1, 0, 1)).stages()
    assert [(stage.rank, stage.replica) for stage in stages] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert check_welcome(hello(), welcome(stages)) is None
    assert check_welcome(hello(UPPER, LOWER), welcome(stages)) is None
    assert check_hello(offer(UPPER, UPPER, LOWER, LOWER, replicas=(0, 1, 0, 1)), hello().checksums, hello()) is None


def test_one_replica_is_encoded_as_before() -> None:
    encoded = msgspec.msgpack.encode(offer(UPPER, LOWER).stages())
    assert b"replica" not in encoded
    assert msgspec.msgpack.decode(encoded)[1].keys() == {"rank", "data_port", "geometry"}


def test_a_peer_without_the_field_refuses() -> None:
    """It skips the key, and finds every head twice."""
    encoded = msgspec.to_builtins(offer(WHOLE, WHOLE, replicas=(0, 1)).stages())
    known: list[dict[str, Any]] = [{name: each[name] for name in each if name != "replica"} for each in encoded]
    refuse = check_welcome(hello(), welcome(msgspec.convert(known, tuple[StageInfo, ...])))
    assert refuse is not None
    assert refuse.code == "split_mismatch"


@pytest.mark.parametrize("geometries", [(WHOLE, UPPER), (UPPER, WHOLE)])
def test_each_replica_has_every_layer(geometries: tuple[Geometry, ...]) -> None:
    refuse = check_welcome(hello(), welcome(offer(*geometries, replicas=(0, 1)).stages()))
    assert refuse is not None
    assert refuse.code.endswith("_mismatch")


def chunk(start: int, count: int, number: int, last: bool = False) -> tuple[Chunk, list[int]]:
    frame = UPPER.token_bytes * count
    header = Chunk(
        ticket="t",
        generation=1,
        chunk=number,
        start=start,
        count=count,
        row=0,
        payload_bytes=frame,
        pages=pack([5]),
        total=number + 1 if last else 0,
    )
    return header, [metadata.ROW_BYTES, frame] if last else [frame]


@pytest.fixture
def table() -> InboundTable:
    """Expects a ticket of 16 tokens from the stages 0 and 2 of replica 0, or 1 and 3 of replica 1."""
    made = InboundTable(WHOLE)
    order = PrepareReceive(
        seq=0, request=1, session="s", ticket="t", generation=1, start=0, count=16, pages=pack([5]), row=0
    )
    sources = dict(enumerate((UPPER, UPPER, LOWER, LOWER)))
    assert made.prepare(order, sources, {0: 0, 1: 1, 2: 0, 3: 1}) == ""
    return made


def put(table: InboundTable, stage: int, start: int, count: int, number: int, last: bool = False) -> AcceptChunk:
    header, frames = chunk(start, count, number, last)
    verdict = table.check("s", stage, header, frames)
    assert isinstance(verdict, AcceptChunk), verdict
    assert table.written(verdict, header, FIRST if last else None) == ""
    return verdict


def test_complete_with_all_stages_of_one_replica(table: InboundTable) -> None:
    assert not put(table, 3, 0, 16, 0, last=True).inbound.complete
    assert put(table, 1, 0, 16, 0, last=True).inbound.complete


def test_nothing_is_bound_before_a_chunk_is_written(table: InboundTable) -> None:
    header, frames = chunk(0, 8, 0)
    assert isinstance(table.check("s", 0, header, frames), AcceptChunk)
    inbound = put(table, 1, 0, 8, 0).inbound
    assert (inbound.replica, inbound.complete) == (1, False)


def test_chunks_of_another_replica_are_refused(table: InboundTable) -> None:
    put(table, 1, 0, 8, 0)
    for stage in (0, 2):
        verdict = table.check("s", stage, *chunk(0, 8, 0))
        assert isinstance(verdict, RejectChunk)
        assert verdict.code == "bad_chunk"
        assert "replica 0" in verdict.message
        assert "replica 1" in verdict.message
    assert isinstance(table.check("s", 1, *chunk(0, 8, 0)), RepeatChunk)


def test_a_replica_that_lacks_layers_is_refused() -> None:
    order = PrepareReceive(
        seq=0, request=1, session="s", ticket="t", generation=1, start=0, count=16, pages=pack([5]), row=0
    )
    assert "bytes of a token" in InboundTable(WHOLE).prepare(order, {0: WHOLE, 1: UPPER}, {0: 0, 1: 1})
