"""What servers that share experts (--dp-external) must have in common, since their ranks compute the same passes."""

from importlib.metadata import PackageNotFoundError, version

import msgspec

from headrace.core.config import StageConfig
from headrace.engine.device import resolve_computation
from headrace.engine.model.checkpoint import open_checkpoint
from headrace.engine.model.fingerprint import fingerprint
from headrace.engine.model.source import load_spec, resolve_source


def common_terms(config: StageConfig) -> dict[str, str]:
    """Values by the flag that sets them, as text. Raises ConfigError for a model that cannot be read."""
    model, engine = config.model, config.engine
    source = resolve_source(model.model)
    spec = load_spec(source)
    computation = resolve_computation(model, engine.cpuinfo)
    return {
        "the version of Headrace": _version(),
        "the model of --model": fingerprint(spec, open_checkpoint(source, spec), model.quantize)[:12],
        "--dtype": computation.dtype,
        "--quantize": model.quantize,
        "the dtype of hidden states": computation.compute_dtype,
        "--device": computation.device.partition(":")[0],
        "--max-model-len": str(model.max_model_len),
        "--page-size": str(engine.page_size),
        "--chunk-tokens": str(engine.pass_tokens),
        "--chunking": "dynamic" if config.measure_tokens else "fixed",
        "SIZE of --dp-external": str(config.shared_layout.dp),
        "--tp": str(config.layout.tp),
        "--exchange": engine.exchange,
        "--dp-sync": config.dp_sync,
        "rules of a pass": msgspec.json.encode(config.rules).decode(),
    }


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "not installed"
