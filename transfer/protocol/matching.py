"""Compatibility check at the handshake (guarantee G6), and the choice of backend and checksum. Pure.

Each check returns a Refuse that names both values, which server has which, and both models, or None. Both sides check,
so neither relies on the other; the text is the same on both sides.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from headrace.core.config import TransferConfig
from headrace.core.types.kv.backends import (
    CUDA_IPC,
    NIXL,
    SHM,
    ZMQ,
    CudaIpcMemory,
    NixlMemory,
    PoolMemory,
    SharedMemory,
)
from headrace.core.types.kv.geometry import KV, Component, Geometry
from headrace.transfer.protocol import checksum, messages, metadata
from headrace.transfer.protocol.layout import common
from headrace.transfer.protocol.messages import ComponentShape, Hello, Refuse, StageInfo, Welcome

MAX_PAGE_SIZE = 1 << 16
PREFILL = "the prefill server"
MODEL_CHARS = 128  # of a model's name in a refusal
Part = tuple[int, Component]  # a stage, and what it has of a tensor


class BackendOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill server offers to peers, known once all its stages are ready."""

    instance: str
    """Random id of this process, 128 bits in hexadecimal."""
    fingerprint: str
    geometries: tuple[Geometry, ...]
    """KV pool shape of each stage."""
    data_ports: tuple[int, ...]
    """Data socket of each stage."""
    max_model_len: int
    data_hosts: tuple[str, ...] = ()
    """Host of each data socket; "" or an empty tuple stands for the control endpoint's host."""
    backends: tuple[str, ...] = (ZMQ,)
    """Backends that all stages can send by, best first."""
    shared_memory: frozenset[str] = frozenset()
    """Shared-memory host tokens of the stages."""
    nixl: frozenset[str] = frozenset()
    """NIXL versions of the stages."""
    unreachable_gpus: frozenset[str] = frozenset()
    """UUIDs of the host's GPUs whose memory some stage cannot write into."""
    replicas: tuple[int, ...] = ()
    """Data-parallel replica of each stage; an empty tuple: there is one."""
    model: str = ""
    """The name under which the server serves its model."""

    def stages(self) -> tuple[StageInfo, ...]:
        """The stages as Welcome lists them."""
        hosts = self.data_hosts or ("",) * len(self.data_ports)
        replicas = self.replicas or (0,) * len(self.data_ports)
        columns = zip(self.data_ports, self.geometries, hosts, replicas, strict=True)
        return tuple(StageInfo(rank, *column) for rank, column in enumerate(columns))


NOTHING_AVOIDED: Mapping[str, str] = MappingProxyType({})


class Mismatch(NamedTuple):
    """A field of the two sides that does not fit, of one of their components, or of one stage of the others."""

    field: str
    ours: object
    theirs: object
    stage: int | None = None
    """Which of their stages has their value; None: it is of all of them."""
    component: str = KV

    @property
    def code(self) -> str:
        """That of the refusal."""
        return f"{self.field if self.component == KV else 'components'}_mismatch"


class BackendChoice(NamedTuple):
    """The chosen backend ("" if none works) and why it was chosen."""

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
    model: str = "",
) -> Hello:
    """Hello of this version of the program.

    kv_pages: of the smallest stage's pool. backends: those that work at all stages. memory: how their pools may be
    written. model: the name of the model, for people.
    """
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
        components=components_of(geometries),
        memory=memory,
        model=model[: messages.MAX_NAME_CHARS],
    )


def check_hello(offer: BackendOffer, checksums: tuple[str, ...], hello: Hello) -> Refuse | None:
    """Checks a peer's hello at the control endpoint. Returns why it is refused, None if it fits."""
    found = _hello_mismatch(offer, checksums, hello)
    if found is None:
        return None
    ours, theirs = _at(PREFILL, offer.model), _at(_peer(hello), hello.model, found.stage)
    return _refuse(found, f"{_show(found.ours)} {ours}, {_show(found.theirs)} {theirs}")


def check_welcome(hello: Hello, welcome: Welcome) -> Refuse | None:
    """Checks the answer to a hello at the peer. Returns why it is refused, None if it fits."""
    found = _welcome_mismatch(hello, welcome)
    if found is None:
        return None
    ours, theirs = _at(_peer(hello), hello.model), _at(PREFILL, welcome.model, found.stage)
    return _refuse(found, f"{_show(found.theirs)} {theirs}, {_show(found.ours)} {ours}")


def _hello_mismatch(offer: BackendOffer, checksums: tuple[str, ...], hello: Hello) -> Mismatch | None:
    """What of a peer's hello does not fit."""
    if messages.VERSION not in hello.protocols:
        return Mismatch("protocol", messages.VERSION, hello.protocols)
    if hello.fingerprint != offer.fingerprint:
        return Mismatch("fingerprint", offer.fingerprint, hello.fingerprint)
    if hello.metadata_version != metadata.VERSION:
        return Mismatch("metadata_version", metadata.VERSION, hello.metadata_version)
    if hello.metadata_bytes != metadata.ROW_BYTES:
        return Mismatch("metadata_bytes", metadata.ROW_BYTES, hello.metadata_bytes)
    if not set(checksums) & set(hello.checksums):
        return Mismatch("checksum", checksums, hello.checksums)
    choice = choose_backend(offer, hello)
    if not choice.backend:
        return Mismatch("backend", f"{', '.join(offer.backends)} ({choice.reason})", ", ".join(hello.backends))
    if sorted(hello.components) != sorted(components_of(offer.geometries)):
        return Mismatch("components", _named(components_of(offer.geometries)), _named(hello.components))
    return check_geometries(offer.geometries, hello.geometries, replicas=True)


def _welcome_mismatch(hello: Hello, welcome: Welcome) -> Mismatch | None:
    """What of the answer to a hello does not fit."""
    if welcome.protocol not in hello.protocols:
        return Mismatch("protocol", hello.protocols, welcome.protocol)
    if welcome.fingerprint != hello.fingerprint:
        return Mismatch("fingerprint", hello.fingerprint, welcome.fingerprint)
    if welcome.checksum not in hello.checksums:
        return Mismatch("checksum", hello.checksums, welcome.checksum)
    if welcome.backend not in hello.backends:
        return Mismatch("backend", hello.backends, welcome.backend)
    if welcome.heartbeat_s >= welcome.timeout_s:
        return Mismatch("heartbeat_s", f"less than timeout_s {welcome.timeout_s}", welcome.heartbeat_s)
    if sorted(welcome.components) != sorted(hello.components):
        return Mismatch("components", _named(hello.components), _named(welcome.components))
    replicas = sorted({stage.replica for stage in welcome.stages})
    each = ([stage.geometry for stage in welcome.stages if stage.replica == replica] for replica in replicas)
    found = (check_geometries(hello.geometries, tuple(geometries)) for geometries in each)
    return next((mismatch for mismatch in found if mismatch is not None), None)


def components_of(geometries: tuple[Geometry, ...]) -> tuple[ComponentShape, ...]:
    """KV components of a side over all its stages, sorted by name."""
    parts = _by_name(geometries)
    parts.pop(KV, None)
    return tuple(_shape([part for _, part in parts[name]]) for name in sorted(parts))


def check_geometries(
    ours: tuple[Geometry, ...], theirs: tuple[Geometry, ...], *, replicas: bool = False
) -> Mismatch | None:
    """Checks that both sides have the same dtype, head size, layers and heads, of the model and of each component.

    Page sizes and the split over ranks may differ; their split must have each head of each layer exactly once.
    replicas: ranks with exactly the same layers and heads count as one (more ranks than heads).
    """
    for rank, their in enumerate(theirs):
        names = [tensor.name for tensor in their.tensors]
        if not names:
            return Mismatch("layers", "1 or more", their.layers, rank)
        if len(set(names)) != len(names):
            return Mismatch("components", "each name once", ", ".join(names), rank)
        if not 1 <= their.page_size <= MAX_PAGE_SIZE:
            return Mismatch("page_size", f"1 to {MAX_PAGE_SIZE}", their.page_size, rank)
    if len({their.page_size for their in theirs}) != 1:
        return Mismatch("page_size", "one for all stages", [their.page_size for their in theirs])
    parts, their_parts = _by_name(ours), _by_name(theirs)
    if parts.keys() != their_parts.keys():
        return Mismatch("components", ", ".join(sorted(parts)), ", ".join(sorted(their_parts)))
    found = (_check_tensor(name, parts[name], their_parts[name], replicas) for name in parts)
    return next((mismatch for mismatch in found if mismatch is not None), None)


def _check_tensor(name: str, ours: list[Part], theirs: list[Part], replicas: bool) -> Mismatch | None:
    """As check_geometries, for one of the tensors. The lists have the parts of the stages that have some of it."""
    our = asdict(ours[0][1])
    for rank, part in theirs:
        their = asdict(part)
        for field in ("dtype", "head_dim", "planes"):
            if our[field] != their[field]:
                return Mismatch(field, our[field], their[field], rank, name)
        for field in ("layers", "kv_heads"):
            if their[field] < 1:
                return Mismatch(field, "1 or more", their[field], rank, name)
    whole, their_whole = (asdict(_whole([part for _, part in parts])) for parts in (ours, theirs))
    for field in ("layer_start", "layers", "head_start", "kv_heads"):
        if whole[field] != their_whole[field]:
            return Mismatch(field, whole[field], their_whole[field], component=name)
    return _check_split(name, whole["layers"] * whole["kv_heads"], theirs, replicas)


def _check_split(name: str, expected: int, parts: list[Part], replicas: bool) -> Mismatch | None:
    """Whether parts that together span a tensor have each head of each layer once. expected: heads over all layers."""
    for one, other in combinations(parts, 2):
        if common(one[1], other[1]) is not None and not (replicas and one[1] == other[1]):
            return Mismatch("split", "each head of each layer once", f"{_own(*one)}; {_own(*other)}", component=name)
    owned = [part for _, part in parts]
    found = sum(part.layers * part.kv_heads for part in (set(owned) if replicas else owned))
    if found != expected:
        there = f"{found}: {'; '.join(_own(*part) for part in parts)}"
        return Mismatch("split", f"{expected} heads over all layers", there, component=name)
    return None


def _by_name(ranks: tuple[Geometry, ...]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for rank, geometry in enumerate(ranks):
        for tensor in geometry.tensors:
            found.setdefault(tensor.name, []).append((rank, tensor))
    return found


def _whole(parts: list[Component]) -> Component:
    """The one rank that would have all layers and heads of these."""
    layer, head = min(part.layer_start for part in parts), min(part.head_start for part in parts)
    layers = max(part.layer_end for part in parts) - layer
    heads = max(part.head_end for part in parts) - head
    return replace(parts[0], layer_start=layer, layers=layers, head_start=head, kv_heads=heads)


def _shape(parts: list[Component]) -> ComponentShape:
    whole = _whole(parts)
    shape = whole.layers, whole.planes, whole.kv_heads, whole.head_dim
    return ComponentShape(whole.name, whole.dtype, shape, whole.per_request, whole.window)


def _own(number: int, part: Component) -> str:
    layers, heads = f"{part.layer_start} to {part.layer_end - 1}", f"{part.head_start} to {part.head_end - 1}"
    return f"layers {layers} and heads {heads} in stage {number}"


def choose_backend(offer: BackendOffer, hello: Hello, avoided: Mapping[str, str] = NOTHING_AVOIDED) -> BackendChoice:
    """The prefill server's first backend that works between all stages of both sides.

    avoided: backends to pass over, and why; not if none of the others works.
    """
    reasons: list[str] = []
    works: list[str] = []
    for backend in offer.backends:
        obstacle = _obstacle(backend, offer, hello)
        if not obstacle and backend not in avoided:
            return BackendChoice(backend, "; ".join(reasons) or "the first choice of this server")
        works += [] if obstacle else [backend]
        reasons.append(f"not {backend}: {obstacle or avoided[backend]}")
    return BackendChoice(works[0] if works else "", "; ".join(reasons))


def _obstacle(backend: str, offer: BackendOffer, hello: Hello) -> str:
    """Why payload cannot move in this way; "" when it can."""
    if backend not in hello.backends:
        return f"the peer accepts {', '.join(hello.backends)}"
    if backend == SHM:
        shared = [memory.shm for memory in hello.memory if memory.shm is not None]
        return _missing(shared, hello) or _elsewhere(shared, offer)
    if backend == CUDA_IPC:
        mapped = [memory.cuda_ipc for memory in hello.memory if memory.cuda_ipc is not None]
        return _missing(mapped, hello) or _elsewhere(mapped, offer) or _unreachable(mapped, offer)
    if backend == NIXL:
        reached = [memory.nixl for memory in hello.memory if memory.nixl is not None]
        versions = offer.nixl | {pool.version for pool in reached}
        text = f"the stages of the two have versions {', '.join(sorted(versions))}"
        return _missing(reached, hello) or ("" if len(versions) == 1 else text)
    return ""


def _elsewhere(pools: Sequence[SharedMemory | CudaIpcMemory], offer: BackendOffer) -> str:
    """Why the peer's pools are not where our stages are; "" when they are."""
    hosts = offer.shared_memory | {pool.host for pool in pools}
    return "" if len(hosts) == 1 else "the stages of the two are not on one host"


def _unreachable(pools: Sequence[CudaIpcMemory], offer: BackendOffer) -> str:
    """Why some stage's GPU cannot write into those of the peer; "" where nothing says so: a process may see fewer GPUs
    than it can reach."""
    beyond = sorted({pool.device for pool in pools} & offer.unreachable_gpus)
    return f"no peer access from all GPUs of this server to {', '.join(beyond)}" if beyond else ""


def _missing(pools: Sequence[SharedMemory | CudaIpcMemory | NixlMemory], hello: Hello) -> str:
    """What is not there of the pools that the peer should have opened; "" when it has all."""
    if len(pools) != len(hello.geometries):
        return f"the peer shares {len(pools)} pools of {len(hello.geometries)}"
    if min(pool.pages for pool in pools) < hello.kv_pages:
        return f"the peer shares {min(pool.pages for pool in pools)} pages of {hello.kv_pages}"
    return ""


def choose_checksum(accepted: tuple[str, ...], offered: tuple[str, ...]) -> str:
    """Our first checksum that the peer offers; check_hello has verified that there is one."""
    return next(kind for kind in accepted if kind in offered)


def _refuse(found: Mismatch, values: str) -> Refuse:
    """The refusal of a mismatch. values: of both sides, with who has which."""
    about = found.field if found.component == KV else f"components: {found.field} of {found.component}"
    return Refuse(code=found.code, message=messages.text(f"{about}: {values}"))


def _peer(hello: Hello) -> str:
    return "the decode server" if hello.role == "decode" else "the peer"


def _at(server: str, model: str, stage: int | None = None) -> str:
    """Which side has a value, and its model; sides of earlier releases name none."""
    place = server if stage is None else f"stage {stage} of {server}"
    return f"at {place} (model {_show(model, MODEL_CHARS)})" if model else f"at {place}"


def _named(components: tuple[ComponentShape, ...]) -> str:
    return ", ".join(f"{each.name} {each.dtype} {list(each.shape)}" for each in components) or "none"


def _show(value: object, limit: int = 300) -> str:
    shown = str(value)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
