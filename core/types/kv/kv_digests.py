"""Digests of the KV of a few positions, the same for every layout of a pool: page size, tensor-parallel ranks, stages.

    each rank:   SHA-256 of the bytes [planes, positions, head_dim] of each tensor, layer and head of it  ─► DigestPart
    scheduler:   SHA-256 over the heads of a layer, in their order                                         ─► KvDigest

Layers are kept apart, so that two digests that differ say where. Pure.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec

UNIT_BYTES = 32

KvDigest = Mapping[str, tuple[str, ...]]
"""By the name of a tensor of the pool: of each layer, in order, a SHA-256 in hexadecimal."""


class DigestPages(msgspec.Struct, frozen=True):
    """Positions whose KV is digested behind a forward pass."""

    pages: bytes
    """Packed ids of the pages that they lie in."""
    first: int
    """Slot of the first position in the first page."""
    count: int


class DigestPart(msgspec.Struct, frozen=True):
    """What one rank has of one tensor."""

    tensor: str
    layer_start: int
    head_start: int
    heads: int
    units: bytes
    """Digests of UNIT_BYTES each: [layers, heads]."""


def joined(parts: Iterable[DigestPart]) -> dict[str, tuple[str, ...]]:
    """The digest of what all ranks have. Heads that several ranks have are counted once."""
    tensors: dict[str, dict[int, dict[int, bytes]]] = {}
    for part in parts:
        layers = tensors.setdefault(part.tensor, {})
        for index in range(len(part.units) // UNIT_BYTES):
            layer, head = divmod(index, part.heads)
            unit = part.units[index * UNIT_BYTES : (index + 1) * UNIT_BYTES]
            layers.setdefault(part.layer_start + layer, {})[part.head_start + head] = unit
    return {name: tuple(_of_heads(layers[layer]) for layer in sorted(layers)) for name, layers in tensors.items()}


def comparable(one: KvDigest, other: KvDigest) -> bool:
    """Whether both are of the same layers of some tensor."""
    shared = one.keys() & other.keys()
    return bool(shared) and all(len(one[name]) == len(other[name]) for name in shared)


def differing(one: KvDigest, other: KvDigest) -> list[str]:
    """Layers that differ, as "kv 3", of the tensors that both have; none where the KV is equal."""
    return [
        f"{name} {layer}"
        for name in sorted(one.keys() & other.keys())
        for layer, (ours, theirs) in enumerate(zip(one[name], other[name], strict=True))
        if ours != theirs
    ]


def _of_heads(units: Mapping[int, bytes]) -> str:
    return sha256(b"".join(units[head] for head in sorted(units))).hexdigest()
