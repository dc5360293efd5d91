"""Resolves what a configuration leaves to the model and the machine: dtype, device, lengths, threads, KV pages."""

from collections.abc import Sequence

import msgspec

from headrace.core.config import Config, DecoderChoice, EngineConfig, ModelConfig
from headrace.core.config.scheduler import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS
from headrace.core.runtime.cpu import usable_cores
from headrace.core.types.errors import ConfigError
from headrace.core.types.ranks.coordinate import Rules
from headrace.core.types.requests.images import ImageTerms
from headrace.engine.device import resolve_computation, resolve_device
from headrace.engine.kv.memory_plan import MemoryPlan
from headrace.engine.load_plan import model_spec, model_terms
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.expert_plan import ExpertPlan, check_experts, plan_experts
from headrace.engine.model.sharding import split_model
from headrace.engine.model.source import resolve_source
from headrace.engine.parallel.layer_split import stage_layers
from headrace.engine.parallel.offers import check_offers
from headrace.server.config.consistency import check
from headrace.server.config.curve_keys import check_keys
from headrace.server.config.load import copy_shared
from headrace.server.config.rank_memory import plan_ranks, rank_parts


class Resolved(msgspec.Struct, frozen=True):
    """A configuration without open choices. External stages resolve device, threads and KV pages themselves."""

    config: Config
    memory: tuple[MemoryPlan, ...]
    """Memory plan of each rank; empty with external stages."""
    parts: tuple[str, ...]
    """What each rank holds of the model, in words; empty for a single rank."""
    decoder: str
    """What computes the model, in words."""

    @property
    def memory_lines(self) -> tuple[str, ...]:
        """How the memory of each rank is divided, in words."""
        if not self.memory:
            return ("memory: each external stage plans its own when it starts",)
        names = [f" of {self.config.scheduler.layout.name(rank)}" for rank in range(len(self.memory))]
        where = names if len(names) > 1 else [""]
        return tuple(f"memory{of}: {plan.explanation}" for of, plan in zip(where, self.memory, strict=True))


def resolve(config: Config, memory_bytes: int = 0) -> Resolved:
    """Inspect the model and the machine. memory_bytes: of the machine that it is to be planned for, see plan_ranks().
    Raises ConfigError for a model that cannot be served here."""
    check_keys(config)
    if config.group.start == "external":
        return _resolve_external(
            config, model_spec(resolve_source(config.model.model), config.model.decoder, config.server.cache_dir)
        )
    elsewhere = memory_bytes > 0
    config = _with_chunk(config, resolve_device(config.model.device, elsewhere=elsewhere))
    if config.group.links == "host" and config.scheduler.tp > 1:  # whose sums the host waits for
        config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, cuda_graphs="off"))
    terms = model_terms(config.model, config.engine, elsewhere=elsewhere)
    spec, device, dtype = terms.spec, terms.computation.device, terms.computation.dtype
    layers = _layers(config, spec)
    layout, shards = config.scheduler.layout, split_model(spec, config.scheduler.tp)
    check_offers(layout, shards, receives=config.server.fetches_kv)
    member = config.group.member
    if config.group.dp_sync == "device" and device == "cpu":
        raise ConfigError("--dp-sync device is for GPUs and --device is cpu: leave it out, or write --dp-sync cpu")
    if config.group.links == "device" and device == "cpu":
        raise ConfigError("--links device is for GPUs and --device is cpu: leave it out")
    experts = plan_experts(terms.computation, config.engine, layout, spec, member)
    memory = plan_ranks(
        terms,
        layout,
        layers,
        shards,
        experts,
        kv_pages=config.engine.kv_pages,
        host_pages=config.engine.host_pages,
        memory_bytes=memory_bytes,
    )
    threads = config.engine.threads or max(1, usable_cores() // len(layout.ranks))
    engine = msgspec.structs.replace(config.engine, kv_pages=memory[0].kv_pages, threads=threads, pp_layers=layers)
    model = msgspec.structs.replace(config.model, device=device, dtype=dtype, max_model_len=terms.length)
    completed = _completed(_coordinated(config, experts), spec, model, engine)
    return Resolved(completed, memory, rank_parts(layout, layers, shards, experts), _decoder(spec))


def _resolve_external(config: Config, spec: ModelSpec) -> Resolved:
    """Resolve what depends on the model only; each external stage sizes its pool on its own machine."""
    config = _with_chunk(config, "cuda" if config.model.device.startswith("cuda") else "cpu")
    model = msgspec.structs.replace(config.model, max_model_len=spec.resolve_length(config.model.max_model_len))
    engine = msgspec.structs.replace(config.engine, pp_layers=_layers(config, spec))
    layout, shards = config.scheduler.layout, split_model(spec, config.scheduler.tp)
    check_offers(layout, shards, receives=config.server.fetches_kv)
    check_experts(engine, layout, spec)
    experts = plan_experts(
        resolve_computation(msgspec.structs.replace(model, device="cpu"), engine.cpuinfo), engine, layout, spec
    )
    completed = _completed(_coordinated(config, experts), spec, model, engine)
    return Resolved(completed, (), rank_parts(layout, engine.pp_layers, shards, experts), _decoder(spec))


def _with_chunk(config: Config, device: str) -> Config:
    """With the tokens of a pass that suit the device, where none are configured. Raises ConfigError."""
    if config.scheduler.chunk_tokens:
        return config
    chunk = CPU_CHUNK_TOKENS if device == "cpu" else GPU_CHUNK_TOKENS
    scheduler = msgspec.structs.replace(config.scheduler, chunk_tokens=chunk)
    with_chunk = copy_shared(msgspec.structs.replace(config, scheduler=scheduler))
    check(with_chunk)
    return with_chunk


def _coordinated(config: Config, experts: ExpertPlan | None) -> Config:
    """With the rules of lockstep passes, where replicas share experts: those of this server, whose scheduler plans each
    pass for all of them, or one of each of several servers, whose ranks agree."""
    if experts is None or experts.dp == 1:
        return config
    rules = Rules(
        multiple=experts.tp,
        pad="max" if experts.way == "allgather" else "none",
        cut=config.engine.overlap,
        cut_prefill=config.scheduler.overlap_prefill_tokens,
        cut_decode=config.scheduler.overlap_decode_tokens,
    )
    scheduler = msgspec.structs.replace(config.scheduler, lockstep=config.group.member is None, rules=rules)
    return msgspec.structs.replace(config, scheduler=scheduler)


def _decoder(spec: ModelSpec) -> str:
    if spec.library is None:
        return "native"
    return f"library: {spec.library.architecture} of transformers"


def _completed(config: Config, spec: ModelSpec, model: ModelConfig, engine: EngineConfig) -> Config:
    scheduler = msgspec.structs.replace(config.scheduler, vocab_size=spec.vocab_size)
    decoder: DecoderChoice = "native" if spec.library is None else "library"
    images, no_images = _images(spec, engine.pp_layers)
    model = msgspec.structs.replace(
        model, hidden_size=spec.hidden_size, decoder=decoder, images=images, no_images=no_images
    )
    return copy_shared(msgspec.structs.replace(config, model=model, engine=engine, scheduler=scheduler))


def _images(spec: ModelSpec, layers: Sequence[int]) -> tuple[ImageTerms | None, str]:
    """How a model takes images in stages of so many layers, or why not."""
    if spec.library is None:
        return None, "this model has no image encoder, or is computed by our own layers (--decoder native)"
    terms = spec.library.images
    if terms is None:
        return None, f"{spec.library.architecture}: {spec.library.no_images}"
    if layers[0] < terms.levels:
        return None, f"its images go into the first {terms.levels} layers, and the first stage has {layers[0]}"
    return terms, ""


def _layers(config: Config, spec: ModelSpec) -> tuple[int, ...]:
    """Layers of each stage. A decode server runs the LM head for every token, others about once per chunk."""
    given = config.engine.pp_layers
    if not given:
        sampled_share = 1.0 if config.server.role == "decode" else 1 / config.scheduler.chunk_tokens
        return stage_layers(spec, config.scheduler.stages, sampled_share)
    if sum(given) != spec.layers:
        shown = ",".join(map(str, given))
        raise ConfigError(f"--pp-layers {shown} is {sum(given)} layers in all and the model has {spec.layers}")
    return given
