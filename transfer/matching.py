"""What a prefill server and a decode peer must have in common (G6), and what they agree on. Pure.

Each check returns a Refuse that names both values, or None. Both sides check, so neither trusts the other's care.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from core.backends import NIXL, SHM, ZMQ, NixlMemory, PoolMemory, SharedMemory
from core.config import TransferConfig
from core.geometry import Geometry
from transfer import checksum, messages, metadata
from transfer.layout import overlap
from transfer.messages import Component, Hello, Refuse, StageInfo, Welcome

MAX_PAGE_SIZE = 1 << 16


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill server is, known once all its stages are ready. geometries, data_ports and data_hosts: one per
    stage; a host is "" where it is the desk's own (none given: all are). instance: random id of this process, 128 bits
    in hex. backends: what all its stages can send by, best first. shared_memory: the tokens of their hosts. nixl: their
    versions of NIXL."""

    instance: str
    fingerprint: str
    geometries: tuple[Geometry, ...]
    data_ports: tuple[int, ...]
    max_model_len: int
    data_hosts: tuple[str, ...] = ()
    backends: tuple[str, ...] = (ZMQ,)
    shared_memory: frozenset[str] = frozenset()
    nixl: frozenset[str] = frozenset()

    def stages(self) -> tuple[StageInfo, ...]:
        """As the desk tells them to peers."""
        hosts = self.data_hosts or ("",) * len(self.data_ports)
        columns = zip(self.data_ports, self.geometries, hosts, strict=True)
        return tuple(StageInfo(rank, port, geometry, host) for rank, (port, geometry, host) in enumerate(columns))


class Choice(NamedTuple):
    """A way to move payload, and why it is that one. backend "": there is none."""

    backend: str
    reason: str


def make_hello(
    config: TransferConfig,
    *,
    instance: str,
    name: str,
    role: str,
    fingerprint: str,
    geometries: tuple[Geometry, ...],
    kv_pages: int,
    max_model_len: int,
    metadata_rows: int,
    backends: tuple[str, ...] = (ZMQ,),
    memory: tuple[PoolMemory, ...] = (),
) -> Hello:
    """The hello of this version of the program. kv_pages: of the smallest of the stages' pools. backends: what works at
    all stages. memory: how their pools may be written."""
    return Hello(
        protocols=(messages.VERSION,),
        instance=instance,
        name=name,
        role=role,
        fingerprint=fingerprint,
        geometries=geometries,
        kv_pages=kv_pages,
        max_model_len=max_model_len,
        metadata_version=metadata.VERSION,
        metadata_bytes=metadata.ROW_BYTES,
        metadata_rows=metadata_rows,
        window_bytes=config.window_bytes,
        checksums=checksum.kinds(config.checksum),
        backends=backends,
        components=messages.COMPONENTS,
        memory=memory,
    )


def check_hello(offer: Offer, checksums: tuple[str, ...], hello: Hello) -> Refuse | None:
    """The desk's check."""
    if messages.VERSION not in hello.protocols:
        return _refuse("protocol", messages.VERSION, hello.protocols)
    if hello.fingerprint != offer.fingerprint:
        return _refuse("fingerprint", offer.fingerprint, hello.fingerprint)
    if hello.metadata_version != metadata.VERSION:
        return _refuse("metadata_version", metadata.VERSION, hello.metadata_version)
    if hello.metadata_bytes != metadata.ROW_BYTES:
        return _refuse("metadata_bytes", metadata.ROW_BYTES, hello.metadata_bytes)
    if not set(checksums) & set(hello.checksums):
        return _refuse("checksum", checksums, hello.checksums)
    choice = choose_backend(offer, hello)
    if not choice.backend:
        return _refuse("backend", f"{', '.join(offer.backends)} ({choice.reason})", ", ".join(hello.backends))
    if hello.components != messages.COMPONENTS:
        return _refuse("components", _named(messages.COMPONENTS), _named(hello.components))
    return check_geometries(offer.geometries, hello.geometries, replicas=True)


def check_welcome(hello: Hello, welcome: Welcome) -> Refuse | None:
    """The peer's check of what the desk answered to its hello."""
    if welcome.protocol not in hello.protocols:
        return _refuse("protocol", hello.protocols, welcome.protocol)
    if welcome.fingerprint != hello.fingerprint:
        return _refuse("fingerprint", hello.fingerprint, welcome.fingerprint)
    if welcome.checksum not in hello.checksums:
        return _refuse("checksum", hello.checksums, welcome.checksum)
    if welcome.backend not in hello.backends:
        return _refuse("backend", hello.backends, welcome.backend)
    if welcome.heartbeat_s >= welcome.timeout_s:
        return _refuse("heartbeat_s", f"less than timeout_s {welcome.timeout_s}", welcome.heartbeat_s)
    if welcome.components != hello.components:
        return _refuse("components", _named(hello.components), _named(welcome.components))
    return check_geometries(hello.geometries, tuple(stage.geometry for stage in welcome.stages))


def check_geometries(
    ours: tuple[Geometry, ...], theirs: tuple[Geometry, ...], *, replicas: bool = False
) -> Refuse | None:
    """dtype, head size, and the layers and KV heads of the model as a whole must be equal; page sizes and the split
    over ranks may differ. Ours are taken to be right; theirs must have each head of each layer once. replicas: ranks
    of exactly the same layers and heads count as one (more ranks than heads)."""
    our = ours[0]
    for rank, their in enumerate(theirs):
        where = f" of stage {rank}"
        for field in ("dtype", "head_dim"):
            here, there = asdict(our)[field], asdict(their)[field]
            if here != there:
                return _refuse(field, here, there, where)
        if their.layers < 1:
            return _refuse("layers", "1 or more", their.layers, where)
        if their.kv_heads < 1:
            return _refuse("kv_heads", "1 or more", their.kv_heads, where)
        if not 1 <= their.page_size <= MAX_PAGE_SIZE:
            return _refuse("page_size", f"1 to {MAX_PAGE_SIZE}", their.page_size, where)
    if len({their.page_size for their in theirs}) != 1:
        return _refuse("page_size", "one for all stages", [their.page_size for their in theirs])
    whole, their_whole = _span(ours), _span(theirs)
    for field in ("layer_start", "layers", "head_start", "kv_heads"):
        if whole[field] != their_whole[field]:
            return _refuse(field, whole[field], their_whole[field])
    return _check_split(whole["layers"] * whole["kv_heads"], theirs, replicas)


def _span(ranks: tuple[Geometry, ...]) -> dict[str, int]:
    """The layers and heads of a side, as the fields of the one geometry that would have them all."""
    layer, head = min(rank.layer_start for rank in ranks), min(rank.head_start for rank in ranks)
    return {
        "layer_start": layer,
        "layers": max(rank.layer_end for rank in ranks) - layer,
        "head_start": head,
        "kv_heads": max(rank.head_end for rank in ranks) - head,
    }


def _check_split(expected: int, ranks: tuple[Geometry, ...], replicas: bool) -> Refuse | None:
    """Whether ranks that together span the model have each head of each layer once. expected: heads over all layers."""
    for (first, one), (second, other) in combinations(enumerate(ranks), 2):
        if overlap(one, other) is not None and not (replicas and one == other):
            return _refuse("split", "each head of each layer once", f"{_own(first, one)}; {_own(second, other)}")
    found = sum(rank.layers * rank.kv_heads for rank in (set(ranks) if replicas else ranks))
    if found != expected:
        owned = "; ".join(_own(number, rank) for number, rank in enumerate(ranks))
        return _refuse("split", f"{expected} heads over all layers", f"{found}: {owned}")
    return None


def _own(number: int, rank: Geometry) -> str:
    layers, heads = f"{rank.layer_start} to {rank.layer_end - 1}", f"{rank.head_start} to {rank.head_end - 1}"
    return f"layers {layers} and heads {heads} in stage {number}"


def choose_backend(offer: Offer, hello: Hello) -> Choice:
    """The first of the prefill server's ways that works between all stages of both sides."""
    reasons: list[str] = []
    for backend in offer.backends:
        obstacle = _obstacle(backend, offer, hello)
        if not obstacle:
            return Choice(backend, "; ".join(reasons) or "the first choice of this server")
        reasons.append(f"not {backend}: {obstacle}")
    return Choice("", "; ".join(reasons))


def _obstacle(backend: str, offer: Offer, hello: Hello) -> str:
    """Why payload cannot move in this way; "" when it can."""
    if backend not in hello.backends:
        return f"the peer accepts {', '.join(hello.backends)}"
    if backend == SHM:
        shared = [memory.shm for memory in hello.memory if memory.shm is not None]
        hosts = offer.shared_memory | {pool.host for pool in shared}
        return _missing(shared, hello) or ("" if len(hosts) == 1 else "the stages of the two are not on one host")
    if backend == NIXL:
        reached = [memory.nixl for memory in hello.memory if memory.nixl is not None]
        versions = offer.nixl | {pool.version for pool in reached}
        text = f"the stages of the two have versions {', '.join(sorted(versions))}"
        return _missing(reached, hello) or ("" if len(versions) == 1 else text)
    return ""


def _missing(pools: Sequence[SharedMemory | NixlMemory], hello: Hello) -> str:
    """What is not there of the pools that the peer should have opened; "" when it has all."""
    if len(pools) != len(hello.geometries):
        return f"the peer shares {len(pools)} pools of {len(hello.geometries)}"
    if min(pool.pages for pool in pools) < hello.kv_pages:
        return f"the peer shares {min(pool.pages for pool in pools)} pages of {hello.kv_pages}"
    return ""


def choose_checksum(accepted: tuple[str, ...], offered: tuple[str, ...]) -> str:
    """The first of ours that they offer; check_hello has made sure that there is one."""
    return next(kind for kind in accepted if kind in offered)


def _refuse(field: str, ours: object, theirs: object, where: str = "") -> Refuse:
    return Refuse(
        code=f"{field}_mismatch", message=messages.text(f"{field}{where}: {_show(ours)} here, {_show(theirs)} there")
    )


def _named(components: tuple[Component, ...]) -> str:
    return ", ".join(f"{each.name} {each.dtype} {list(each.shape)}" for each in components) or "none"


def _show(value: object) -> str:
    shown = str(value)
    return shown if len(shown) <= 300 else shown[:299] + "…"
