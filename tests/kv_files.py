"""KV files for tests: small ones with random pages."""

from hashlib import sha256
from pathlib import Path

import numpy as np

from headrace.core.types.kv.geometry import Component
from headrace.core.types.kv.kv_files import KvComputation, KvFileHeader, pack_start
from headrace.core.types.kv.page_digests import text_digests
from headrace.core.types.packed import pack

PAGE_SIZE = 4
TENSORS = (Component("kv", "float32", 4, 2, 8),)
COMPUTATION = KvComputation("cpu test avx2", "float32", "none", "2.13.0", "0.1.0")


def kv_file(
    tokens: range | list[int],
    seed: int = 0,
    *,
    tensors: tuple[Component, ...] = TENSORS,
    fingerprint: str = "fp",
    page_size: int = PAGE_SIZE,
    computation: KvComputation = COMPUTATION,
) -> tuple[KvFileHeader, list[bytes]]:
    """Its header and its pages."""
    page_bytes = sum(tensor.token_bytes for tensor in tensors) * page_size
    random = np.random.default_rng(seed)
    pages = [random.bytes(page_bytes) for _ in range(len(tokens) // page_size)]
    packed = pack(tokens)
    header = KvFileHeader(
        model="m",
        fingerprint=fingerprint,
        page_size=page_size,
        tensors=tensors,
        tokens=packed,
        digests=b"".join(text_digests(packed, page_size)),
        checksums=b"".join(sha256(page).digest() for page in pages),
        computation=computation,
    )
    return header, pages


def write(path: Path, header: KvFileHeader, pages: list[bytes]) -> bytes:
    """Write a file. Returns its digest."""
    start = pack_start(header)
    path.write_bytes(start + b"".join(pages))
    return start[16:48]
