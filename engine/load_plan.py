"""How a rank loads its part of a model: source, dtype, kernels' units, layers, shard, memory. Nothing is loaded here.

    --model, --dtype, --device …      what one rank holds
            │                               │
      ModelTerms, of all ranks   ───►   LoadPlan, of one   ───►   ModelRunner, StubRunner

`headrace check` prints the same plans that stages load.
"""

from importlib.util import find_spec
from typing import NamedTuple

import msgspec

from headrace.core.config import DecoderChoice, EngineConfig, ModelConfig
from headrace.core.types.errors import ConfigError, UnknownModel
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.device import Computation, available_memory, has_float8_units, resolve_computation
from headrace.engine.kv.memory_plan import MemoryPlan, plan_memory, stage_geometry, weight_count
from headrace.engine.library.spec_store import kept_spec
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.expert_plan import own_experts
from headrace.engine.model.graph_sizes import graph_sizes
from headrace.engine.model.lora import LoraAdapter, check_native, delta_count, open_adapters
from headrace.engine.model.quantization_scheme import read_scheme
from headrace.engine.model.sharding import RankPart, part_of, split_model
from headrace.engine.model.source import ModelSource, load_spec, read_json, resolve_source


class ModelTerms(NamedTuple):
    """What all ranks of a server load a model with."""

    model: ModelConfig
    engine: EngineConfig
    source: ModelSource
    spec: ModelSpec
    computation: Computation
    """Device, dtype, and whether the device multiplies that dtype."""
    length: int
    """Positions of the longest sequence."""
    adapters: tuple[LoraAdapter, ...] = ()
    """Of --lora."""
    float8: bool = False
    """Linear layers whose weights are published in FP8 keep these, and multiply in FP8."""

    @property
    def int8(self) -> bool:
        """Linear layers are in 8 bits."""
        return self.model.quantize == "int8"

    def plan(self, part: RankPart, kv_pages: int, available_bytes: int, *, kv_copies: float = 1.0) -> "LoadPlan":
        """How a rank loads this part. kv_pages, available_bytes, kv_copies: see plan_memory(). Raises ConfigError when
        it does not fit, and for some layers of a model that cannot be divided."""
        library = self.spec.library
        if library is not None and len(part.layers) < self.spec.layers and not library.divisible:
            raise ConfigError(f"the layers of {library.architecture} cannot be divided into stages; write --pp 1")
        memory = plan_memory(
            part,
            self.computation,
            self.engine.page_size,
            kv_pages,
            available_bytes,
            max_model_len=self.length,
            int8=self.int8,
            float8=self.float8,
            kv_copies=kv_copies,
            adapter_weights=delta_count(part, self.adapters),
            kv_share=self.engine.kv_memory,
            pass_tokens=self.engine.pass_tokens,
            graphs=self._graphs(part),
            flashinfer=self._may_use_flashinfer,
        )
        plan = LoadPlan(self, part, memory)
        if library is not None and part.shard.offered and plan.offered is None:
            raise ConfigError(
                f"layers {part.layers.start} to {part.layers.stop - 1} of {library.architecture} cache nothing that "
                "shards divide; write a lower --pp, or --tp 1"
            )
        return plan

    @property
    def _may_use_flashinfer(self) -> bool:
        """Attention is tried with it."""
        wanted = self.engine.attention
        return self.spec.library is None and (
            wanted == "flashinfer" or (wanted == "auto" and find_spec("flashinfer") is not None)
        )

    def _graphs(self, part: RankPart) -> tuple[int, ...]:
        """Sizes of passes that CUDA graphs are captured of, see NativeDecoder.capture()."""
        spec, on_gpu = self.spec, self.computation.device != "cpu"
        experts = spec.moe.experts if spec.moe is not None else 0
        shards = part.shard.count
        among_replicas = part.experts not in (None, len(own_experts(experts, shards, part.shard.index)))
        if not on_gpu or self.engine.cuda_graphs == "off" or spec.library or among_replicas:
            return ()
        return graph_sizes(self.engine.pass_tokens)


class LoadPlan(NamedTuple):
    """How one rank loads its part of a model."""

    terms: ModelTerms
    part: RankPart
    memory: MemoryPlan

    @property
    def geometry(self) -> Geometry:
        """Shape of the rank's KV pool."""
        return stage_geometry(self.part, self.terms.computation.dtype, self.terms.engine.page_size)

    @property
    def offered(self) -> Geometry | None:
        """What of the pool is offered to peers; None where another shard offers the same."""
        library, shard = self.terms.spec.library, self.part.shard
        if library is not None and shard.offered:
            return library.offered(self.geometry, shard.index)
        return self.geometry if shard.offered else None

    @property
    def weights(self) -> int:
        """Number of parameters."""
        return weight_count(self.part)


def model_spec(source: ModelSource, decoder: DecoderChoice = "auto", cache_dir: str = "") -> ModelSpec:
    """The specification of a model, for the decoder that --decoder names.

    cache_dir: where it may be kept, "" for nowhere. Raises ConfigError for a model that the decoder cannot run.
    """
    if source.kind == "stub":
        if decoder == "library":
            raise ConfigError("--decoder library computes real models; leave it out for this one")
        return load_spec(source)
    reason = ""
    if decoder != "library":
        try:
            return load_spec(source)
        except UnknownModel as unknown:
            if decoder == "native":
                raise
            reason = f"{unknown}; "
    try:
        return kept_spec(source, cache_dir)
    except ConfigError as error:
        raise ConfigError(f"{reason}{error}") from error


def model_terms(
    model: ModelConfig, engine: EngineConfig, max_model_len: int = 0, *, elsewhere: bool = False
) -> ModelTerms:
    """Find the model and resolve what is left to it and to the machine.

    max_model_len: 0 takes the configured length, or the model's limit. elsewhere: on another machine, that has the
    device and all that Headrace can use of it. Raises ConfigError for a model, device or length that does not work
    here.
    """
    source = resolve_source(model.model)
    spec = model_spec(source, model.decoder, engine.cache_dir)
    if engine.windows == "free" and (spec.library is None or not spec.library.has_rings):
        why = "computed by our own layers" if spec.library is None else spec.library.architecture
        raise ConfigError(
            f"--windows free: no layer of this model ({why}) has a window that can be freed; leave it out"
        )
    if spec.library is not None and engine.windows == "keep":
        spec = msgspec.structs.replace(spec, library=spec.library.without_rings())
    adapters = open_adapters(model.lora)
    if adapters and source.kind == "stub":
        raise ConfigError("--lora: the stub model has no adapters")
    if spec.library is None:
        check_native(adapters, spec)
    computation = resolve_computation(model, engine.cpuinfo, elsewhere=elsewhere)
    multiplies = computation.device != "cpu" and computation.dtype != "float32" and engine.compile != "off"
    if engine.attention in ("flashinfer", "triton"):
        _check_attention(engine, spec, computation.device)
    return ModelTerms(
        model=model,
        engine=engine,
        source=source,
        spec=spec,
        computation=computation,
        length=spec.resolve_length(max_model_len or model.max_model_len),
        adapters=adapters,
        float8=(
            multiplies
            and spec.library is None
            and source.kind == "hf"
            and read_scheme(source.path, read_json(source.path / "config.json"), read_json).float8
            and (elsewhere or (find_spec("triton") is not None and has_float8_units(computation.device)))
        ),
    )


def _check_attention(engine: EngineConfig, spec: ModelSpec, device: str) -> None:
    """Raises ConfigError for a model or device whose attention the wanted kernels do not compute."""
    why = ""
    if device == "cpu":
        why = "it is for GPUs, and --device is cpu"
    elif spec.mla is not None and engine.attention == "triton":
        why = "this model attends to latents"
    elif spec.mla is not None and engine.mla == "expanded":
        why = "--mla expanded does not read the latents where they are"
    elif spec.library is not None:
        why = "this model is computed by transformers' modules"
    if why:
        raise ConfigError(f"--attention {engine.attention}: {why}; leave it out")


def plan_rank(
    model: ModelConfig,
    engine: EngineConfig,
    max_model_len: int = 0,
    *,
    layers: range | None = None,
    tp: int = 1,
    shard: int = 0,
    experts: int | None = None,
    exchange_bytes: int = 0,
) -> LoadPlan:
    """The plan of a rank in the memory that its device has free now.

    max_model_len: as for model_terms(). layers: None takes all. tp, shard: the shards of its stage, and which it is.
    experts: how many routed ones of a layer it holds; None for its share among the shards. exchange_bytes: see
    RankPart. Raises ConfigError for what does not work here or does not fit.
    """
    terms = model_terms(model, engine, max_model_len)
    if experts is None and terms.spec.moe is not None and tp > 1:
        experts = len(own_experts(terms.spec.moe.experts, tp, shard))
    part = part_of(terms.spec, layers, split_model(terms.spec, tp)[shard], experts, exchange_bytes)
    return terms.plan(part, engine.kv_pages, available_memory(terms.computation.device))
