"""The bytes of version 1, as docs/protocol.md shows them. A difference here is a change of the protocol."""

import msgspec
import pytest
from msgspec.structs import fields

from headrace.core.messages.orders import PrepareReceive
from headrace.core.runtime.codec import DecodeError
from headrace.core.types.packed import pack, unpack
from headrace.core.types.requests.draft import NO_DRAFT, DraftTerms
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.data.inbound import AcceptChunk, InboundTable, RejectChunk
from headrace.transfer.data.payload import write_frames
from headrace.transfer.protocol import checksum, draft_frame, messages, metadata
from headrace.transfer.protocol.matching import components_of
from headrace.transfer.protocol.messages import Chunk, Hello, Message, Reserve
from tests.transfer import examples
from tests.transfer.examples import EXAMPLES, GEOMETRY, PAGE, Example

SHOWN = examples.shown()
TEXT = PAGE.read_text()
KINDS = sorted(Message.__subclasses__(), key=lambda kind: kind.__name__)


@pytest.mark.parametrize(("example", "frames"), list(zip(EXAMPLES, SHOWN, strict=True)))
def test_the_bytes_on_the_page_are_those_of_the_code_both_ways(example: Example, frames: list[bytes]) -> None:
    assert list(example.encoded) == frames
    assert example.codec.decode(frames[0]) == example.message


def test_every_message_is_shown() -> None:
    assert {type(example.message) for example in EXAMPLES} == set(KINDS)


def test_the_chunks_on_the_page_are_accepted_by_the_code() -> None:
    table = InboundTable(GEOMETRY)
    expect = PrepareReceive(
        seq=0, request=1, session="s", ticket="ticket-1", generation=1, start=0, count=3, pages=pack([8, 9]), row=5
    )
    assert table.prepare(expect, {0: GEOMETRY}) == ""
    for example, (_, *frames) in zip(EXAMPLES, SHOWN, strict=True):
        header = example.message
        if isinstance(header, Chunk) and (header.ticket, header.generation) == (examples.TICKET, 1):
            verdict = table.check("s", 0, header, [len(frame) for frame in frames])
            assert isinstance(verdict, AcceptChunk)
            assert checksum.of_frames(frames) == header.checksum
            first = metadata.decode(frames[0]).first if header.total else None
            assert table.written(verdict, header, first) == ""
            inbound = verdict.inbound
    assert inbound.complete
    assert inbound.first == examples.FIRST


def test_the_chunk_with_a_draft_frame_on_the_page_is_accepted_by_the_code() -> None:
    reserve, header = (example.message for example in EXAMPLES[30:32])
    assert isinstance(reserve, Reserve)
    assert isinstance(header, Chunk)
    frames = SHOWN[31][1:]
    terms = DraftTerms(reserve.hidden, reserve.draft_top_k)
    expect = PrepareReceive(
        seq=0, request=1, session="s", ticket=reserve.ticket, generation=2, start=2, count=1, pages=reserve.pages,
        row=5, draft=terms,
    )  # fmt: skip
    table = InboundTable(GEOMETRY)
    assert table.prepare(expect, {0: GEOMETRY}) == ""
    assert isinstance(table.check("s", 0, header, [len(frame) for frame in frames]), AcceptChunk)
    assert checksum.of_frames(frames) == header.checksum
    assert draft_frame.decode(frames[1], reserve.ticket, 2) == examples.DRAFT
    refused = InboundTable(GEOMETRY)
    refused.prepare(msgspec.structs.replace(expect, draft=NO_DRAFT), {0: GEOMETRY})
    assert isinstance(refused.check("s", 0, header, [len(frame) for frame in frames]), RejectChunk)


def test_the_hello_and_the_chunk_with_a_component_on_the_page_are_accepted_by_the_code() -> None:
    geometry = examples.LATENT_GEOMETRY
    table = InboundTable(geometry)
    expect = PrepareReceive(
        seq=0, request=1, session="s", ticket="ticket-8", generation=1, start=0, count=2, pages=pack([8]), row=5
    )
    assert table.prepare(expect, {0: geometry}) == ""
    [(header, frames)] = [
        (example.message, frames)
        for example, (_, *frames) in zip(EXAMPLES, SHOWN, strict=True)
        if isinstance(example.message, Chunk) and example.message.ticket == "ticket-8"
    ]
    assert isinstance(header, Chunk)
    verdict = table.check("s", 0, header, [len(frame) for frame in frames])
    assert isinstance(verdict, AcceptChunk)
    assert checksum.of_frames(frames) == header.checksum
    store = ArrayPageStore(geometry, 9)
    write_frames(store, verdict.copies, unpack(header.pages), [memoryview(frame) for frame in frames])
    assert store.data[8].tobytes() == examples.PAGE_0
    assert store.tensors["latent"][8].tobytes() == examples.LATENT_0
    hellos = [example.message for example in EXAMPLES if isinstance(example.message, Hello)]
    [latent] = [one for one in hellos if one.components]
    assert latent.components == components_of(latent.geometries)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described(kind: type[Message]) -> None:
    section = TEXT.split(f"#### {kind.__name__}\n")[1].split("\n#")[0]
    for field in fields(kind):
        assert f"| `{field.name}` |" in section, f"{kind.__name__}.{field.name}"


def test_the_metadata_table_is_the_layout_of_the_code() -> None:
    assert metadata.ROW.fields is not None
    for name, (kind, offset, *_) in metadata.ROW.fields.items():
        assert f"| {offset} | {kind.itemsize} | `{name}` |" in TEXT, name
    assert f"{metadata.ROW_BYTES} bytes" in TEXT


def test_fields_of_later_versions_are_skipped() -> None:
    body = msgspec.msgpack.decode(EXAMPLES[6].encoded[0])
    assert examples.ANSWER.decode(msgspec.msgpack.encode({**body, "colour": "blue"})) == EXAMPLES[6].message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ticket", "x" * 257),
        ("ticket", ""),
        ("ticket", 7),
        ("generation", -1),
        ("generation", 1 << 63),
        ("prompt_tokens", 0),
        ("cached_tokens", -1),
        ("row", 1 << 31),
        ("pages", b"\0" * (4 * messages.MAX_PAGES + 1)),
        ("pages", "text"),
    ],
)
def test_values_out_of_bounds_are_no_messages(field: str, value: object) -> None:
    reserve = next(example for example in EXAMPLES if isinstance(example.message, Reserve))
    body = msgspec.msgpack.decode(reserve.encoded[0])
    with pytest.raises(DecodeError):
        examples.PEER.decode(msgspec.msgpack.encode({**body, field: value}))


def test_a_message_of_the_other_direction_is_no_message() -> None:
    for example in EXAMPLES:
        for codec in (examples.PEER, examples.STAGE):
            if isinstance(example.message, messages.Welcome):
                with pytest.raises(DecodeError):
                    codec.decode(example.encoded[0])


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"1 to {messages.MAX_TICKET_CHARS} characters" in TEXT
    assert f"up to {messages.MAX_TEXT_CHARS} characters" in TEXT
    assert f"up to {messages.MAX_PAGES:,} pages" in TEXT
    assert f"{messages.CONTROL_FRAME_BYTES:,} bytes" in TEXT
    assert f"{messages.ANSWER_FRAME_BYTES:,} bytes" in TEXT
