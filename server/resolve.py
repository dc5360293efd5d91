"""What a configuration leaves to the model and the machine: dtype, device, lengths, threads, KV pages."""

import os

import msgspec

from core.config import Config
from engine.device import available_memory, resolve_device, resolve_dtype
from engine.memory import MemoryPlan, plan_memory
from engine.model.source import load_spec, resolve_source
from server.config import share


class Resolved(msgspec.Struct, frozen=True):
    """A configuration without anything left open, and the memory it takes."""

    config: Config
    memory: MemoryPlan


def resolve(config: Config) -> Resolved:
    """Look at the model and the machine. Raises ConfigError for a model that cannot be served here."""
    spec = load_spec(resolve_source(config.model.model))
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    length = spec.resolve_length(config.model.max_model_len)
    memory = plan_memory(
        spec,
        dtype,
        config.engine.page_size,
        config.engine.kv_pages,
        available_memory(device),
        max_model_len=length,
    )
    threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) // config.scheduler.stages)
    resolved = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, device=device, dtype=dtype, max_model_len=length),
        engine=msgspec.structs.replace(config.engine, kv_pages=memory.kv_pages, threads=threads),
        scheduler=msgspec.structs.replace(config.scheduler, vocab_size=spec.vocab_size),
    )
    return Resolved(share(resolved), memory)
