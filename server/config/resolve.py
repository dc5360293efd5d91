"""Resolves what a configuration leaves to the model and the machine: dtype, device, lengths, threads, KV pages."""

import os
from functools import partial

import msgspec

from headrace.core.config import Config, EngineConfig, ModelConfig
from headrace.core.types.errors import ConfigError
from headrace.engine.device import available_memory, computes_in, resolve_device, resolve_dtype
from headrace.engine.kv.memory_plan import MemoryPlan, add_host_tier, plan_memory
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.parallel.layer_split import ranges, stage_layers
from headrace.server.config.curve_keys import check_keys
from headrace.server.config.load import copy_shared


class Resolved(msgspec.Struct, frozen=True):
    """A configuration without open choices. External stages resolve device, threads and KV pages themselves."""

    config: Config
    memory: tuple[MemoryPlan, ...]
    """Memory plan of each stage of a replica; empty with external stages."""


def resolve(config: Config) -> Resolved:
    """Inspect the model and the machine. Raises ConfigError for a model that cannot be served here."""
    check_keys(config)
    spec = load_spec(resolve_source(config.model.model))
    if config.group.start == "external":
        return _resolve_external(config, spec)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device, config.engine.cpuinfo)
    length = spec.resolve_length(config.model.max_model_len)
    layers = _layers(config, spec)
    plan = partial(
        plan_memory,
        spec,
        dtype,
        config.engine.page_size,
        max_model_len=length,
        native_units=computes_in(dtype, device, config.model.quantize, config.engine.cpuinfo),
        int8=config.model.quantize == "int8",
    )
    replicas = config.scheduler.dp
    available = available_memory(device) // (replicas if device == "cpu" else 1)
    # Local stages share the machine's memory, so the plan of the whole model decides how many pages fit.
    whole = plan(config.engine.kv_pages, available)
    room = available - whole.weight_bytes - whole.kv_bytes if device == "cpu" else available_memory("cpu") // replicas
    whole = add_host_tier(whole, config.engine.host_pages, room)
    memory: tuple[MemoryPlan, ...] = (whole,)
    if len(layers) > 1:
        parts = (plan(whole.kv_pages, available, layers=part) for part in ranges(layers))
        memory = tuple(add_host_tier(part, whole.host_pages, room) for part in parts)
    threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) // len(config.scheduler.layout.ranks))
    engine = msgspec.structs.replace(config.engine, kv_pages=whole.kv_pages, threads=threads, pp_layers=layers)
    model = msgspec.structs.replace(config.model, device=device, dtype=dtype, max_model_len=length)
    return Resolved(_completed(config, spec, model, engine), memory)


def _resolve_external(config: Config, spec: ModelSpec) -> Resolved:
    """Resolve what depends on the model only; each external stage sizes its pool on its own machine."""
    model = msgspec.structs.replace(config.model, max_model_len=spec.resolve_length(config.model.max_model_len))
    engine = msgspec.structs.replace(config.engine, pp_layers=_layers(config, spec))
    return Resolved(_completed(config, spec, model, engine), ())


def _completed(config: Config, spec: ModelSpec, model: ModelConfig, engine: EngineConfig) -> Config:
    scheduler = msgspec.structs.replace(config.scheduler, vocab_size=spec.vocab_size)
    return copy_shared(msgspec.structs.replace(config, model=model, engine=engine, scheduler=scheduler))


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
