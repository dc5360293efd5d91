"""Messages of SGLang decode engines with the NIXL backend, as of SGLang 0.5.23: ZMQ frames by position. Pure.

    decode rank ──Registration──► once, before its first room: its NIXL agent, where its KV and metadata rows lie
                ──RoomTarget──►   the pages and the metadata row that a room's KV goes to
                ──Abort──►        give the room up
                ◄──KV_STATUS──    all is written, or nothing will be
                ◄──ABORT_ACK──    nothing is being written for the room any more

Nothing is versioned: newer releases add frames at the end, so what is there is told from the number of frames. Numbers
are ASCII decimals, lists packed integers. Source: sglang/srt/disaggregation/, nixl/conn.py and common/conn.py.
"""

import ipaddress
import struct
from collections.abc import Sequence

import msgspec

GUARD = b"NixlMsgGuard"
ABORT = b"ABORT"
REGISTRATION_FRAMES = 14  # fewest of a registration: up to the dimensions of states
ROOM_FRAMES = 8  # fewest of a room: up to the number of decode ranks
MAX_ROOM = (1 << 63) - 1
MAX_FRAME = 16 << 20  # the pages of four million tokens, one each
SUCCESS, FAILED = 4, 0  # of SGLang's KVPoll, the two that end a room
RANK = b"0"  # of a prefill side that is one rank
MAX_REASON_CHARS = 400


class Address(msgspec.Struct, frozen=True):
    """Where a decode rank listens for KV_STATUS and ABORT_ACK."""

    host: str
    """An IP address."""
    port: int


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one decode rank."""

    address: Address
    agent: str
    """Name of its NIXL agent, which rooms refer to."""
    agent_metadata: bytes
    kv_addresses: tuple[int, ...]
    """Addresses of the keys of all layers, then of the values of all layers."""
    aux_addresses: tuple[int, ...]
    """Addresses of the metadata buffers, in their fixed order."""
    gpu: int
    tp_size: int
    tp_rank: int
    page_bytes: tuple[int, ...]
    """Size of one page of each KV buffer."""
    pages: int | None = None
    """Pages of each KV buffer; None where the engine does not tell."""
    memory_kinds: tuple[str, ...] = ()
    """NIXL's memory type of each KV buffer; empty: all "VRAM"."""
    layer_ids: tuple[int, ...] = ()
    """Layer of each KV buffer; empty: in order."""
    dcp_size: int = 1
    has_states: bool = False
    """There is memory besides keys and values, as that of Mamba layers or of sliding windows."""


class RoomTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where one decode rank wants a room's KV."""

    room: int
    address: Address
    agent: str
    pages: tuple[int, ...]
    """Pages of positions [prefix, prompt length)."""
    aux_index: int
    """Metadata row."""
    ranks: int
    """Decode ranks that send a RoomTarget for this room."""
    prefix: int = 0
    """Tokens whose KV the engine has already."""
    dummy: bool = False
    """Nothing is to be written to this rank."""


class Abort(msgspec.Struct, frozen=True, kw_only=True):
    """The engine gives a room up."""

    room: int
    address: Address | None = None
    generation: int | None = None
    """Named in the ABORT_ACK; None: no acknowledgement is waited for."""


def parse(frames: Sequence[bytes]) -> Registration | RoomTarget | Abort:
    """A message of a decode rank. Raises ValueError for everything else, with what is wrong."""
    if not frames:
        raise ValueError("a message without frames")
    if frames[0] == ABORT:
        return _abort(frames)
    if frames[0] != GUARD or len(frames) < 2:
        raise ValueError(f"a message that begins with {frames[0][:20]!r}; only ABORT and {GUARD.decode()} are served")
    return _registration(frames[1:]) if frames[1] == b"None" else _room_target(frames[1:])


def kv_status(room: int, reason: str | None) -> list[bytes]:
    """KV_STATUS of a room: all is written, or, with a reason, nothing will be."""
    status = SUCCESS if reason is None else FAILED
    return [b"KV_STATUS", _ascii(room), _ascii(status), RANK, (reason or "")[:MAX_REASON_CHARS].encode()]


def abort_ack(room: int, generation: int) -> list[bytes]:
    """ABORT_ACK: nothing is being written for the room any more."""
    return [b"ABORT_ACK", _ascii(room), RANK, _ascii(generation)]


def _registration(frames: Sequence[bytes]) -> Registration:
    """The frames after the guard."""
    if len(frames) < REGISTRATION_FRAMES:
        raise ValueError(f"a registration of {len(frames) + 1} frames; it has {REGISTRATION_FRAMES + 1} or more")
    kv = _integers("KV addresses", frames[5], "Q")
    sizes = _integers("page sizes", _frame(frames, 18), "Q") or (_number("page size", frames[11]),) * len(kv)
    kinds = _frame(frames, 17)
    pages = _frame(frames, 16)
    return Registration(
        address=_address(frames[1], frames[2]),
        agent=_text("agent", frames[3]),
        agent_metadata=frames[4],
        kv_addresses=kv,
        aux_addresses=_integers("addresses of metadata buffers", frames[6], "Q"),
        gpu=_number("gpu", frames[8]),
        tp_size=_number("tp size", frames[9]),
        tp_rank=_number("tp rank", frames[10]),
        page_bytes=sizes,
        pages=_number("pages", pages) if pages else None,
        memory_kinds=tuple(_text("memory kinds", kinds).split(",")) if kinds else (),
        layer_ids=_integers("layer ids", _frame(frames, 20), "I"),
        dcp_size=_number("dcp size", _frame(frames, 21) or b"1"),
        has_states=_has_items(frames[7]),
    )


def _room_target(frames: Sequence[bytes]) -> RoomTarget:
    """The frames after the guard."""
    if len(frames) < ROOM_FRAMES - 1:
        raise ValueError(f"a room of {len(frames) + 1} frames; it has {ROOM_FRAMES} or more")
    pages = _integers("pages", frames[4], "i")
    prefix = _number("prefix", _frame(frames, 8) or b"0")
    flag = _frame(frames, 9)
    dummy = bool(_number("dummy", flag)) if flag else not pages and not prefix
    if any(page < 0 for page in pages):
        raise ValueError(f"page {min(pages)} of a room")
    return RoomTarget(
        room=_room(frames[0]),
        address=_address(frames[1], frames[2]),
        agent=_text("agent", frames[3]),
        pages=pages,
        aux_index=0 if dummy else _number("metadata row", frames[5]),
        ranks=_number("decode ranks", frames[6]),
        prefix=prefix,
        dummy=dummy,
    )


def _abort(frames: Sequence[bytes]) -> Abort:
    if len(frames) < 2:
        raise ValueError("an ABORT without a room")
    return Abort(
        room=_room(frames[1]),
        address=_address(frames[2], frames[3]) if len(frames) > 3 else None,
        generation=_number("generation", frames[4]) if len(frames) > 4 else None,
    )


def _frame(frames: Sequence[bytes], index: int) -> bytes:
    """Empty where the engine's release does not have it yet."""
    return frames[index] if index < len(frames) else b""


def _room(frame: bytes) -> int:
    room = _number("room", frame)
    if room > MAX_ROOM:
        raise ValueError(f"room {room}; the largest is {MAX_ROOM}")
    return room


def _address(host: bytes, port: bytes) -> Address:
    text, number = _text("host", host), _number("port", port)
    if not 1 <= number <= 65535:
        raise ValueError(f"port {number}")
    return Address(str(ipaddress.ip_address(text)), number)


def _text(what: str, frame: bytes) -> str:
    if not frame or len(frame) > MAX_FRAME or not frame.isascii():
        raise ValueError(f"{what}: {frame[:20]!r}")
    return frame.decode("ascii")


def _number(what: str, frame: bytes) -> int:
    if not frame.isdigit() or len(frame) > 20:
        raise ValueError(f"{what}: {frame[:20]!r} is no number")
    return int(frame)


def _integers(what: str, frame: bytes, kind: str) -> tuple[int, ...]:
    size = struct.calcsize(f"<{kind}")
    if len(frame) % size or len(frame) > MAX_FRAME:
        raise ValueError(f"{what}: {len(frame)} bytes, which are no list of integers of {size} bytes")
    return struct.unpack(f"<{len(frame) // size}{kind}", frame)


def _has_items(frame: bytes) -> bool:
    """Whether a packed list of lists has an item: number of lists, length of each in bytes, then their bytes."""
    if not frame:
        return False
    if len(frame) < 4:
        raise ValueError(f"a list of lists of {len(frame)} bytes")
    (lists,) = struct.unpack_from("<I", frame)
    return len(frame) > 4 + 4 * int(lists)


def _ascii(number: int) -> bytes:
    return str(number).encode()
