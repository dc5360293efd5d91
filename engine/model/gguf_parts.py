"""Files of a GGUF model: one, or the parts that llama.cpp's gguf-split makes, by their names."""

import re
from pathlib import Path

from headrace.core.types.errors import ConfigError, first_of

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_OTHER = "mmproj"  # how files of image encoders begin, which lie beside the model's
MAX_PARTS = 1024


def part_paths(path: Path) -> list[Path]:
    """The files of the model that one of them is of, in order. Raises ConfigError for a part that is not there."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    name, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ConfigError(f"{path} is named as part {number} of {count}; a model has 1 to {MAX_PARTS} parts")
    paths = [path.with_name(f"{name}-{each:05}-of-{count:05}.gguf") for each in range(1, count + 1)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise ConfigError(f"{path.parent} lacks parts of the model: {first_of(missing)}")
    return paths


def model_in(folder: Path) -> Path | None:
    """The first file of the GGUF model in a folder; None where there is none. Raises ConfigError for a folder with
    several, and for a part that is not there."""
    files = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith(_OTHER))
    firsts = sorted({part_paths(path)[0] for path in files})
    if len(firsts) > 1:
        names = first_of([path.name for path in firsts])
        raise ConfigError(f"model folder {folder} has several GGUF models; name one of {names}")
    return firsts[0] if firsts else None
