"""Memory plan of a stage: bytes of weights, and how many KV pages fit. Pure arithmetic."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ITEM_BYTES, Component, Geometry
from headrace.engine.device import Computation
from headrace.engine.model.sharding import RankPart, attention_weights

DEFAULT_KV_TOKENS = 65536
WIDE_SHARE = 0.25  # of the available memory, at most, for 16-bit weights held in float32
KV_SHARE = 0.4  # of the available memory, at most, for a KV pool whose size is not configured
GPU_KV_SHARE = 0.9  # the same on a GPU, of what weights and activations leave
SAMPLED_ROWS = 64  # whose logits are in memory at a time
PRODUCT_BYTES = 64 << 20  # that torch gives cuBLAS and cuBLASLt on each stream: 32 MiB each on Hopper and later
COPY_BYTES = 4 * (16 << 20)  # blocks of KV on their way out of the pool and into it, two of each
FLASHINFER_BYTES = (128 + 8 * 8) << 20  # a workspace, and 8 MiB for each plan of a pass in flight
# Of NCCL, for a group that sums or gathers, and for one that only sends or broadcasts: 10 MiB for each of 32 channels
# and each connection. 544 to 688 MiB were reported of sums on four A100 (NVIDIA/nccl issue 964); not measured here.
SUM_LINK_BYTES, LINK_BYTES = 1 << 30, 320 << 20
GRAPH_BYTES = 256 << 10  # of one CUDA graph on the device, at most: about ten launches; not measured here


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a stage will take, and how it was computed."""

    weight_bytes: int
    weight_dtype: str
    """In which the weights are held, apart from linear layers in 8 bits; wider than the model's dtype where the device
    does not multiply that."""
    page_bytes: int
    kv_pages: int
    state_slots: int = 0
    """Requests that have states at a time; 0 where they need none."""
    state_bytes: int = 0
    """Of one request."""
    adapter_bytes: int = 0
    """Of LoRA adapters, beside the weights."""
    host_pages: int = 0
    """Pages of the host tier."""
    available_bytes: int
    """Before the stage takes anything."""
    explanation: str
    """The calculation in words, shown by `headrace check`."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool, with the states of requests."""
        return self.page_bytes * self.kv_pages + self.state_slots * self.state_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier."""
        return self.page_bytes * self.host_pages


def stage_geometry(part: RankPart, dtype: str, page_size: int) -> Geometry:
    """Shape of the KV pool of a rank."""
    spec, layers = part.spec, part.layers
    if spec.mla:
        return spec.mla.geometry(dtype, page_size, layers)
    if spec.library:
        return spec.library.geometry(dtype, page_size, layers, part.shard.index, part.shard.count)
    kv_heads = part.shard.kv_heads
    return Geometry(
        dtype=dtype,
        layers=len(layers),
        kv_heads=len(kv_heads),
        head_dim=spec.head_dim,
        page_size=page_size,
        layer_start=layers.start,
        head_start=kv_heads.start,
        components=_states(part) if spec.state_bytes else (),
    )


def _states(part: RankPart) -> tuple[Component]:
    """What a rank keeps of each request whatever its length."""
    layers, heads = part.layers, part.shard.kv_heads
    size = len(layers), len(heads), part.spec.state_bytes
    return (Component("state", "uint8", *size, 1, layers.start, heads.start, per_request=True),)


def weight_count(part: RankPart) -> int:
    """Number of parameters that a rank holds."""
    spec, layers, shard = part.spec, part.layers, part.shard
    if spec.library:
        return spec.library.weight_count(layers, tied=spec.tied, shards=shard.count)
    query, kv = len(shard.heads) * spec.head_dim, len(shard.kv_heads) * spec.head_dim
    biases = (query + 2 * kv) * spec.qkv_bias + spec.hidden_size * (spec.output_bias and shard.first)
    norms = 2 * spec.hidden_size + 2 * spec.head_dim * spec.qk_norm
    if spec.mla:
        biases = spec.mla.biases(spec.hidden_size if shard.first else 0) * spec.output_bias
        norms = 2 * spec.hidden_size + spec.mla.norms()
    tables = int(part.first) + int(part.last and not (spec.tied and part.first))
    total = linear_count(part) + len(layers) * (biases + norms)
    if spec.moe is not None:
        total += _moe_layers(part) * spec.moe.router_weights(spec.hidden_size)
    return total + tables * shard.vocabulary_block * spec.hidden_size + part.last * spec.hidden_size


def linear_count(part: RankPart) -> int:
    """Number of weights of a rank's linear layers, apart from the output head and routers."""
    spec, shard, routed = part.spec, part.shard, _moe_layers(part)
    if spec.library:
        return spec.library.linear_count(part.layers, shard.count)
    dense = (len(part.layers) - routed) * 3 * spec.hidden_size * len(shard.columns)
    moe = routed * spec.moe.stored_weights(spec.hidden_size, part.experts) if spec.moe is not None else 0
    return len(part.layers) * attention_weights(spec, shard) + dense + moe


def _moe_layers(part: RankPart) -> int:
    return sum(part.spec.layer_kinds[layer] == "moe" for layer in part.layers)


def _never_in_8_bits(part: RankPart) -> int:
    """Weights of linear layers that stay in the dtype of computation: those of MLA that multiply latents from both
    sides."""
    return len(part.layers) * (part.spec.mla.up_weights(len(part.shard.heads)) if part.spec.mla else 0)


def _widening_bytes(part: RankPart, weight_dtype: str) -> int:
    """What weights of MLA take more on GPUs, where one product makes keys and values of latents."""
    mla, heads = part.spec.mla, len(part.shard.heads)
    return len(part.layers) * mla.widening(heads) * ITEM_BYTES[weight_dtype] if mla else 0


class _Taken(NamedTuple):
    """Memory that something else than weights and KV takes."""

    what: str
    size: int
    option: str = ""
    """What takes none of it."""


def plan_memory(
    part: RankPart,
    computation: Computation,
    page_size: int,
    kv_pages: int,
    available_bytes: int,
    *,
    max_model_len: int = 0,
    int8: bool = False,
    float8: bool = False,
    kv_copies: float = 1.0,
    adapter_weights: int = 0,
    kv_share: float = 0.0,
    pass_tokens: int = 0,
    graphs: Sequence[int] = (),
    flashinfer: bool = False,
) -> MemoryPlan:
    """Decide in which dtype a rank holds its weights and how many KV pages it allocates.

    computation: where it is not native, weights are held in float32 if there is room, so that no forward pass converts
    them. kv_pages: 0 takes kv_share of the memory that is left. max_model_len: 0 takes the model's limit. int8, float8:
    linear layers are in 8 bits. kv_copies: how often the memory holds each page, in ranks that share it.
    adapter_weights: number of those of LoRA adapters, in the dtype of computation. kv_share: 0 takes, on a GPU, 90%, on
    a CPU pages for 65,536 tokens or 40% of the available memory, whichever is less. pass_tokens: of the largest forward
    pass, whose activations a GPU keeps room for. graphs: sizes of passes that CUDA graphs are captured of, ascending.
    flashinfer: attention may be computed by it.

    Raises ConfigError when the weights and one request of max_model_len do not fit, or the configured pages do not.
    """
    length = part.spec.resolve_length(max_model_len)
    geometry = stage_geometry(part, computation.dtype, page_size)
    weights, weight_dtype = _weights(part, computation, available_bytes, int8=int8, float8=float8)
    adapters = adapter_weights * ITEM_BYTES[computation.compute_dtype]
    taken = [
        _Taken("adapters", adapters),
        _Taken("the exchange of tokens between experts", part.exchange_bytes),
    ]
    on_gpu = computation.device != "cpu"
    if on_gpu:
        activations = activation_bytes(part, computation.dtype, pass_tokens, length)
        taken.append(_Taken(f"activations of {pass_tokens} tokens", activations))
        taken.append(_Taken("wider weights of latents", _widening_bytes(part, weight_dtype)))
        taken.append(_Taken("images that are encoded", encoding_bytes(part, length)))
        taken.append(_Taken("links between GPUs", _link_bytes(part)))
        taken += _taken_on_gpu(graph_bytes(part, computation.dtype, graphs), flashinfer=flashinfer)
    taken = [each for each in taken if each.size]
    room = int((available_bytes - weights - sum(each.size for each in taken)) / kv_copies)
    if room < geometry.page_bytes:
        parts = (f"{what}{option and f' ({option})'} {_mib(size)}" for what, size, option in taken)
        all_parts = ", ".join((f"the weights take {_mib(weights)}", *parts))
        raise ConfigError(f"{all_parts} and {_mib(available_bytes)} are available")
    share = kv_share or (GPU_KV_SHARE if on_gpu else 0.0)
    available = _Available(available_bytes, room, weights, kv_copies)
    pages, reason = _pool_pages(geometry, length, kv_pages, share, available)
    in_8_bits = "int8 and " if int8 else "float8 and " if float8 else ""
    return MemoryPlan(
        weight_bytes=weights,
        weight_dtype=weight_dtype,
        page_bytes=geometry.page_bytes,
        kv_pages=pages,
        state_slots=geometry.slots_for(pages),
        state_bytes=geometry.state_bytes,
        adapter_bytes=adapters,
        available_bytes=available_bytes,
        explanation="; ".join(
            (
                f"weights {_mib(weights)} ({in_8_bits}{weight_dtype})",
                *(f"{each.what} {_mib(each.size)}" for each in taken),
                *_pool(geometry, pages, reason),
                f"{_mib(available_bytes)} available",
                f"longest request {length} tokens = {geometry.pages_for(length)} pages",
            )
        ),
    )


def _taken_on_gpu(graphs: int, *, flashinfer: bool) -> Iterator[_Taken]:
    """What a GPU's libraries and copies take. graphs: bytes of CUDA graphs; 0 where there are none."""
    yield _Taken("CUDA graphs", graphs, "--cuda-graphs off")
    yield _Taken("workspaces of products", PRODUCT_BYTES * (2 if graphs else 1))
    yield _Taken("copies of KV", COPY_BYTES)
    yield _Taken("FlashInfer", FLASHINFER_BYTES if flashinfer else 0, "--attention torch")


class _Available(NamedTuple):
    """Memory of a rank's device, in bytes."""

    whole: int
    room: int
    """Of it, for one copy of the KV."""
    weights: int
    copies: float
    """How often each page is held."""


def _pool_pages(geometry: Geometry, length: int, kv_pages: int, share: float, available: _Available) -> tuple[int, str]:
    """KV pages of a pool, and why so many. length: of the longest request. kv_pages: as configured; 0: share of the
    room, or where that is 0 as _default_pages(). Raises ConfigError when they do not fit, or hold no such request."""
    size, least, fitting = geometry.page_size, geometry.pages_for(length), geometry.pages_within(available.room)
    if 0 < kv_pages < least:
        raise ConfigError(
            f"{kv_pages} KV pages of {size} tokens hold less than one request of max_model_len {length}; "
            f"write --kv-pages {least} or more, or --max-model-len {kv_pages * size} or less"
        )
    if kv_pages:
        pages, reason = kv_pages, "a set number"
    elif share:
        pages, reason = geometry.pages_within(int(share * available.room)), f"{share:.0%} of what is left"
    else:
        pages, reason = _default_pages(geometry, least, int(available.whole / available.copies), available.room)
    if least <= pages <= fitting:
        return pages, reason
    advice = f"--max-model-len {max(1, min(pages, fitting)) * size} or less"
    if kv_pages and fitting >= least:  # a request fits, only not so many
        advice = f"--kv-pages {fitting} or less, or leave it out"
    needed = _mib(int(geometry.pool_bytes(max(pages, least)) * available.copies))
    raise ConfigError(
        f"{needed} of KV pages do not fit: {_mib(available.whole)} are available and the weights take "
        f"{_mib(available.weights)}; write {advice}"
    )


def _weights(
    part: RankPart, computation: Computation, available_bytes: int, *, int8: bool, float8: bool
) -> tuple[int, str]:
    """Bytes of weights, and the dtype of those that are not in 8 bits. All as in plan_memory()."""
    _, dtype, native = computation
    count = weight_count(part)
    kept = _never_in_8_bits(part) if int8 else 0
    in_8_bits = linear_count(part) - kept if int8 else _in_float8(part) if float8 else 0
    wide = not (native or int8 or 4 * count > WIDE_SHARE * available_bytes)
    item_bytes = ITEM_BYTES["float32" if wide else dtype]
    weights = (count - in_8_bits) * item_bytes + in_8_bits
    weights += 0 if native else kept * (4 - item_bytes)
    return weights, "float32" if wide else dtype


def _in_float8(part: RankPart) -> int:
    """Weights that stay in FP8 where they are published so."""
    return linear_count(part) - _never_in_8_bits(part)


def activation_bytes(part: RankPart, dtype: str, tokens: int, length: int) -> int:
    """Memory of a forward pass of so many tokens in 16 bits on a GPU, beside weights and KV: an estimate from above.

    Hidden states and their norms and sums, the widest MLP, the gathered keys and values of one layer for a sequence of
    this length, and logits.
    """
    spec, shard = part.spec, part.shard
    gathered = length * 2 * len(shard.kv_heads) * spec.head_dim if spec.mla is None else 0
    logits = 3 * SAMPLED_ROWS * spec.vocab_size * ITEM_BYTES["float32"] if part.last else 0
    return ITEM_BYTES[dtype] * (tokens * _widths(part) + gathered) + logits


def encoding_bytes(part: RankPart, length: int) -> int:
    """Memory of the encoder of images, beside its weights, for the largest image in a sequence of this length: an
    estimate from above."""
    encoding = part.spec.library.encoding if part.spec.library and part.first else None
    return min(encoding.most_tokens, length) * encoding.token_bytes if encoding else 0


def _link_bytes(part: RankPart) -> int:
    """Memory of NCCL for the groups of a rank (parallel/groups.py): an estimate, also where they turn out to be linked
    through host memory."""
    shards, neighbors = part.shard.count > 1, (not part.first) + (not part.last)
    sums = shards + 2 * (part.exchange_bytes > 0)
    return SUM_LINK_BYTES * sums + LINK_BYTES * (neighbors + (shards or neighbors > 0))


def graph_bytes(part: RankPart, dtype: str, sizes: Sequence[int]) -> int:
    """Memory of CUDA graphs of passes of these sizes, ascending: an estimate from above. What the layers of the largest
    give, which all share, where hidden states and sums over shards are in buffers; the other buffers; and the graphs
    themselves, of each size: one more than there are layers, and for shards two more of each layer."""
    if not sizes:
        return 0
    buffers = 2 * len(part.shard.heads) * part.spec.head_dim
    shared = ITEM_BYTES[dtype] * sizes[-1] * (_widths(part) + buffers)
    of_layer = 3 if part.shard.count > 1 else 1
    return shared + len(sizes) * (of_layer * len(part.layers) + 1) * GRAPH_BYTES


def _widths(part: RankPart) -> int:
    """Elements of a token's activations that are in memory at a time: hidden states and their norms and sums, and the
    widest MLP."""
    spec, shard = part.spec, part.shard
    hidden, kinds = spec.hidden_size, {spec.layer_kinds[layer] for layer in part.layers}
    wide = 0
    if spec.library:  # all that its products give, if no experts are among them
        wide = min(spec.library.linear_count(part.layers, shard.count) // (len(part.layers) * hidden), 24 * hidden)
    elif "dense" in kinds:
        wide = 3 * len(shard.columns)
    if spec.moe is not None and "moe" in kinds:
        joined = spec.moe.shared_size == spec.moe.intermediate_size  # one more expert, on GPUs
        routed = (spec.moe.top_k + joined) * (3 * hidden + 2 * spec.moe.intermediate_size)
        wide = max(wide, routed + 3 * spec.moe.shared_size // shard.count)
    return 8 * hidden + wide


def _default_pages(geometry: Geometry, least: int, available_bytes: int, room: int) -> tuple[int, str]:
    """KV pages where none are configured, and why so many. least: pages of the longest request. room: bytes that the
    weights leave."""
    wanted = max(least, geometry.pages_for(DEFAULT_KV_TOKENS))
    pages = min(wanted, geometry.pages_within(int(min(KV_SHARE * available_bytes, room))))
    return pages, f"{DEFAULT_KV_TOKENS} tokens" if pages == wanted else f"{KV_SHARE:.0%} of the available memory"


def add_host_tier(plan: MemoryPlan, pages: int, room_bytes: int) -> MemoryPlan:
    """Add a host tier of this many pages to a plan.

    room_bytes: host memory that is left for it. Raises ConfigError when it does not fit.
    """
    if not pages:
        return plan
    planned = msgspec.structs.replace(plan, host_pages=pages)
    if planned.host_bytes > room_bytes:
        fitting = max(0, room_bytes) // plan.page_bytes
        raise ConfigError(
            f"{pages} pages of the host tier take {_mib(planned.host_bytes)} and {_mib(max(0, room_bytes))} of memory "
            f"are left for them; write --host-pages {fitting} or less, or fewer --kv-pages"
        )
    tier = f"host tier {_mib(planned.host_bytes)} = {pages} pages, taken when first used"
    return msgspec.structs.replace(planned, explanation=f"{plan.explanation}; {tier}")


def _pool(geometry: Geometry, pages: int, reason: str) -> Iterator[str]:
    """A pool of so many pages in words. reason: why so many."""
    slots, each = geometry.slots_for(pages), geometry.state_bytes
    yield (
        f"KV {_mib(pages * geometry.page_bytes)} = {pages} pages × {geometry.page_size} tokens × "
        f"{geometry.token_bytes} bytes per token ({reason})"
    )
    if slots:
        yield f"states {_mib(slots * each)} = {slots} requests × {_mib(each)}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
