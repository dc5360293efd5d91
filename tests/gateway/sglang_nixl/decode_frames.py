"""Messages that an SGLang 0.5.23 decode rank with the NIXL backend sends, as it sends them: one frame a line."""

import struct
from collections.abc import Sequence

GUARD = b"NixlMsgGuard"
LAYERS, HEADS, DIM, PAGE = 3, 4, 8, 16  # float32
PAGE_BYTES = PAGE * HEADS * DIM * 4


def number(value: int) -> bytes:
    return str(value).encode("ascii")


def registration(
    *,
    host: str = "127.0.0.1",
    port: int = 7001,
    agent: str = "agent-1",
    metadata: bytes = b"blob",
    kv: Sequence[int] = tuple(range(1000, 1000 + 2 * LAYERS)),
    aux: Sequence[int] = tuple(range(2000, 2010)),
    tp_size: int = 1,
    tp_rank: int = 0,
    page_bytes: int = PAGE_BYTES,
    pages: int = 100,
    kind: str = "DRAM",
    gpu: int = 0,
    states: bytes = b"",
) -> list[bytes]:
    return [
        GUARD,
        b"None",
        host.encode(),
        number(port),
        agent.encode(),
        metadata,
        struct.pack(f"<{len(kv)}Q", *kv),
        struct.pack(f"<{len(aux)}Q", *aux),
        states,  # addresses of states
        number(gpu),
        number(tp_size),
        number(tp_rank),
        number(page_bytes),
        b"",  # item lengths of states
        b"",  # their dimensions
        b"",  # staging address
        b"",  # staging size
        number(pages),
        ",".join([kind] * len(kv)).encode(),
        struct.pack(f"<{len(kv)}Q", *[page_bytes] * len(kv)),
        b"",  # layer ids of states
        b"",  # layer ids
        b"1",  # decode context parallelism
        b"0",
        b"",  # lengths of states
    ]


def room(
    number_: int,
    pages: Sequence[int],
    *,
    host: str = "127.0.0.1",
    port: int = 7001,
    agent: str = "agent-1",
    aux_index: int = 5,
    ranks: int = 1,
    prefix: int = 0,
    dummy: bool = False,
) -> list[bytes]:
    return [
        GUARD,
        number(number_),
        host.encode(),
        number(port),
        agent.encode(),
        b"" if dummy else struct.pack(f"<{len(pages)}i", *pages),
        number(aux_index),
        number(ranks),
        b"",  # pages of states
        number(prefix),
        b"1" if dummy else b"0",
    ]


def abort(number_: int, *, host: str = "127.0.0.1", port: int = 7001, generation: int | None = 1) -> list[bytes]:
    frames = [b"ABORT", number(number_), host.encode(), number(port)]
    return frames if generation is None else [*frames, number(generation)]
