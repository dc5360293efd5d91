"""The worked exchange of docs/protocol.md, as messages. `python -m tests.transfer.examples` writes it into the page."""

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from headrace.core.runtime.codec import Codec
from headrace.core.types.kv.backends import CudaIpcMemory, NixlAccess, NixlMemory, PoolMemory, SharedMemory
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.core.types.packed import pack
from headrace.core.types.requests.draft import Draft, DraftTokens, HiddenStates
from headrace.core.types.requests.request import FirstToken, TokenLogprob
from headrace.transfer.protocol import checksum, draft_frame, metadata
from headrace.transfer.protocol.messages import (
    Ack,
    AnswerMessage,
    Attach,
    Attached,
    Cancel,
    Cancelled,
    Chunk,
    ComponentShape,
    ControlMessage,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Message,
    Nack,
    PeerMessage,
    Ping,
    Pong,
    Refuse,
    Reserve,
    StageInfo,
    StageMessage,
    Welcome,
)

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
BEGIN, END = "<!-- examples: begin -->\n", "<!-- examples: end -->\n"
GEOMETRY = Geometry("float16", layers=1, kv_heads=1, head_dim=2, page_size=2)
SECOND_GEOMETRY = Geometry("float16", layers=1, kv_heads=1, head_dim=2, page_size=2, layer_start=1)
LATENT = Component("latent", "float16", layers=1, kv_heads=1, head_dim=3, planes=1)
LATENT_GEOMETRY = replace(GEOMETRY, components=(LATENT,))
SHARED = SharedMemory(
    host="0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0.1a", name="headrace-kv-" + "77" * 16, bytes=1024, pages=64,
    strides=(16, 16, 8, 8, 4),
)  # fmt: skip
ON_GPU = CudaIpcMemory(
    host=SHARED.host, name="headrace-kv-" + "ff" * 16, device="GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", bytes=1024,
    pages=64, strides=(16, 16, 8, 8, 4),
)  # fmt: skip
TICKET = "ticket-1"
FIRST = FirstToken(token=42, prompt_tokens=3, cached_tokens=0, logprob=TokenLogprob(42, -0.5, (42, 7), (-0.5, -1.5)))
ROW = metadata.encode(TICKET, 1, FIRST)
ROW_2 = metadata.encode(TICKET, 2, FIRST)
DRAFT = Draft(HiddenStates(2, 4, "bfloat16", bytes(range(0xE0, 0xE8))), DraftTokens((42, 7), (0.5, 0.25)))
DRAFT_FRAME = draft_frame.encode(TICKET, 2, DRAFT)
PAGE_0 = bytes(range(16))  # [1, 2, 1, 2, 2 * 2]: two tokens
PAGE_1 = bytes(range(0xA0, 0xA8))  # [1, 2, 1, 1, 2 * 2]: one token
LATENT_0 = bytes(range(0xC0, 0xCC))  # [1, 1, 1, 2, 3 * 2]: two tokens

PEER: Codec[PeerMessage] = Codec(PeerMessage)
CONTROL: Codec[ControlMessage] = Codec(ControlMessage)
ANSWER: Codec[AnswerMessage] = Codec(AnswerMessage)
STAGE: Codec[StageMessage] = Codec(StageMessage)


@dataclass(frozen=True)
class Example:
    """One message of the exchange and the frames after its header. codec: of its direction."""

    direction: str
    message: Message
    codec: Codec  # type: ignore[type-arg]
    frames: tuple[bytes, ...] = ()

    @property
    def encoded(self) -> tuple[bytes, ...]:
        return self.codec.encode(self.message), *self.frames


def chunk(number: int, start: int, count: int, page: int, frames: tuple[bytes, ...], total: int) -> Chunk:
    return Chunk(
        ticket=TICKET, generation=1, chunk=number, start=start, count=count, pages=pack([page]), row=5,
        payload_bytes=count * GEOMETRY.token_bytes, checksum=checksum.of_frames(frames), total=total,
    )  # fmt: skip


EXAMPLES = (
    Example(
        "peer to control endpoint",
        Hello(
            protocols=(1,), instance="11" * 16, name="decode-0", role="decode", fingerprint="tiny-model",
            geometries=(GEOMETRY,), kv_pages=64, max_model_len=128, metadata_version=1, metadata_bytes=256,
            metadata_rows=8, window_bytes=65536, checksums=("xxh3_64",), backends=("zmq",),
        ),
        PEER,
    ),
    Example(
        "control endpoint to peer",
        Welcome(
            protocol=1, session="22" * 16, instance="33" * 16, fingerprint="tiny-model",
            stages=(StageInfo(0, 7001, GEOMETRY),), max_model_len=128, max_tickets=1024, window_bytes=65536,
            checksum="xxh3_64", backend="zmq", heartbeat_s=1.0, timeout_s=3.0,
        ),
        CONTROL,
    ),
    Example("peer to stage", Attach(session="22" * 16, stage=0, checksum="xxh3_64"), ANSWER),
    Example("stage to peer", Attached(stage=0), STAGE),
    Example(
        "peer to control endpoint",
        Reserve(ticket=TICKET, generation=1, prompt_tokens=3, cached_tokens=0, pages=pack([8, 9]), row=5),
        PEER,
    ),
    Example("stage to peer", chunk(0, 0, 2, 8, (PAGE_0,), 0), STAGE, (PAGE_0,)),
    Example("peer to stage", Ack(ticket=TICKET, generation=1, chunk=0), ANSWER),
    Example("stage to peer", chunk(1, 2, 1, 9, (ROW, PAGE_1), 2), STAGE, (ROW, PAGE_1)),
    Example("peer to stage", Ack(ticket=TICKET, generation=1, chunk=1), ANSWER),
    Example("control endpoint to peer", Finished(ticket=TICKET, generation=1), CONTROL),
    Example("peer to control endpoint", Cancel(ticket="ticket-2", generation=2, reason="client left"), PEER),
    Example("control endpoint to peer", Cancelled(ticket="ticket-2", generation=2), CONTROL),
    Example(
        "control endpoint to peer",
        Failed(ticket="ticket-3", generation=3, code="stage_failed", message="stage 0 ended", status=503, stage=0),
        CONTROL,
    ),
    Example(
        "peer to stage",
        Nack(ticket="ticket-4", generation=4, chunk=0, code="checksum_mismatch", message="1 here, 2 there"),
        ANSWER,
    ),
    Example("control endpoint to peer", Refuse(code="fingerprint_mismatch", message="fingerprint: a at the prefill "
    "server, b at the decode server"), CONTROL),
    Example("peer to control endpoint", Ping(number=1), PEER),
    Example("control endpoint to peer", Pong(number=1), CONTROL),
    Example("peer to control endpoint", Goodbye(reason="hung up"), PEER),
    Example("peer to control endpoint", Ping(number=2, renew=("ticket-5", "ticket-6")), PEER),
    Example(
        "peer to control endpoint",
        Reserve(
            ticket="ticket-5", generation=1, prompt_tokens=3, cached_tokens=0, pages=pack([8, 9]), row=5, wait=False
        ),
        PEER,
    ),
    Example(
        "control endpoint to peer",
        Welcome(
            protocol=1, session="44" * 16, instance="55" * 16, fingerprint="tiny-model",
            stages=(StageInfo(0, 7001, GEOMETRY), StageInfo(1, 7001, SECOND_GEOMETRY, data_host="10.0.0.6")),
            max_model_len=128, max_tickets=1024, window_bytes=65536, checksum="xxh3_64", backend="zmq",
            heartbeat_s=1.0, timeout_s=3.0,
        ),
        CONTROL,
    ),
    Example(
        "peer to control endpoint",
        Hello(
            protocols=(1,), instance="66" * 16, name="decode-1", role="decode", fingerprint="tiny-model",
            geometries=(GEOMETRY,), kv_pages=64, max_model_len=128, metadata_version=1, metadata_bytes=256,
            metadata_rows=8, window_bytes=65536, checksums=("xxh3_64",), backends=("shm", "zmq"),
            memory=(PoolMemory(shm=SHARED),),
        ),
        PEER,
    ),
    Example(
        "stage to peer",
        Chunk(
            ticket="ticket-7", generation=1, chunk=0, start=0, count=2, pages=pack([8]), row=5, payload_bytes=16,
            checksum=checksum.of_frames((PAGE_0,)), written=True,
        ),
        STAGE,
    ),
    Example(
        "peer to control endpoint",
        Hello(
            protocols=(1,), instance="88" * 16, name="decode-2", role="decode", fingerprint="tiny-model",
            geometries=(GEOMETRY,), kv_pages=64, max_model_len=128, metadata_version=1, metadata_bytes=256,
            metadata_rows=8, window_bytes=65536, checksums=("xxh3_64",), backends=("nixl", "zmq"),
            memory=(PoolMemory(nixl=NixlMemory(version="1.5", bytes=1024, pages=64, strides=(16, 16, 8, 8, 4))),),
        ),
        PEER,
    ),
    Example(
        "peer to stage",
        Attach(
            session="99" * 16, stage=0, checksum="xxh3_64",
            nixl=NixlAccess(metadata=b"the agent's, as NIXL serialises it", address=0x7F0000001000),
        ),
        ANSWER,
    ),
    Example(
        "peer to control endpoint",
        Hello(
            protocols=(1,), instance="aa" * 16, name="decode-3", role="decode", fingerprint="tiny-model",
            geometries=(LATENT_GEOMETRY,), kv_pages=64, max_model_len=128, metadata_version=1, metadata_bytes=256,
            metadata_rows=8, window_bytes=65536, checksums=("xxh3_64",), backends=("zmq",),
            components=(ComponentShape("latent", "float16", (1, 1, 1, 3)),),
        ),
        PEER,
    ),
    Example(
        "stage to peer",
        Chunk(
            ticket="ticket-8", generation=1, chunk=0, start=0, count=2, pages=pack([8]), row=5, payload_bytes=28,
            checksum=checksum.of_frames((PAGE_0, LATENT_0)),
        ),
        STAGE,
        (PAGE_0, LATENT_0),
    ),
    Example(
        "peer to control endpoint",
        Hello(
            protocols=(1,), instance="bb" * 16, name="decode-4", role="decode", fingerprint="tiny-model",
            geometries=(GEOMETRY,), kv_pages=64, max_model_len=128, metadata_version=1, metadata_bytes=256,
            metadata_rows=8, window_bytes=65536, checksums=("xxh3_64",), backends=("zmq",), model="models/tiny",
        ),
        PEER,
    ),
    Example(
        "control endpoint to peer",
        Welcome(
            protocol=1, session="cc" * 16, instance="dd" * 16, fingerprint="tiny-model",
            stages=(StageInfo(0, 7001, GEOMETRY),), max_model_len=128, max_tickets=1024, window_bytes=65536,
            checksum="xxh3_64", backend="zmq", heartbeat_s=1.0, timeout_s=3.0, model="tiny",
        ),
        CONTROL,
    ),
    Example(
        "peer to control endpoint",
        Reserve(
            ticket="ticket-7", generation=1, prompt_tokens=3, cached_tokens=0, pages=pack([8, 9]), row=5,
            adapter="77" * 16,
        ),
        PEER,
    ),
    Example(
        "peer to control endpoint",
        Reserve(
            ticket=TICKET, generation=2, prompt_tokens=3, cached_tokens=2, pages=pack([9]), row=5, hidden=True,
            draft_top_k=2,
        ),
        PEER,
    ),
    Example(
        "stage to peer",
        Chunk(
            ticket=TICKET, generation=2, chunk=0, start=2, count=1, pages=pack([9]), row=5, payload_bytes=8,
            checksum=checksum.of_frames((ROW_2, DRAFT_FRAME, PAGE_1)), total=1, draft_bytes=len(DRAFT_FRAME),
        ),
        STAGE,
        (ROW_2, DRAFT_FRAME, PAGE_1),
    ),
    Example(
        "peer to control endpoint",
        Hello(
            protocols=(1,), instance="ee" * 16, name="decode-5", role="decode", fingerprint="tiny-model",
            geometries=(GEOMETRY,), kv_pages=64, max_model_len=128, metadata_version=1, metadata_bytes=256,
            metadata_rows=8, window_bytes=65536, checksums=("xxh3_64",), backends=("cuda_ipc", "zmq"),
            memory=(PoolMemory(cuda_ipc=ON_GPU),),
        ),
        PEER,
    ),
)  # fmt: skip


def render() -> str:
    """The examples as the page shows them: every frame in hexadecimal, 32 bytes a line."""
    lines = []
    for number, example in enumerate(EXAMPLES, 1):
        lines += [f"{number}. {example.direction}: **{type(example.message).__name__}**", "", "```text"]
        for index, frame in enumerate(example.encoded):
            lines.append(f"frame {index}, {len(frame)} bytes")
            lines += [f"  {frame[at : at + 32].hex()}" for at in range(0, len(frame), 32)]
        lines += ["```", ""]
    return "\n".join(lines)


def shown() -> list[list[bytes]]:
    """The frames of each example, read back from the page."""
    examples: list[list[bytes]] = []
    for line in PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines():
        if line == "```text":
            examples.append([])
        elif line.startswith("frame "):
            examples[-1].append(b"")
        elif line.startswith("  "):
            examples[-1][-1] += bytes.fromhex(line.strip())
    return examples


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render()}\n{END}{rest.split(END)[1]}")
