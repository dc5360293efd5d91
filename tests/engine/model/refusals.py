"""Model files that `headrace check` refuses."""

from pathlib import Path

import pytest

from headrace.core.types.errors import ConfigError
from headrace.engine.model.checkpoint import check_files
from headrace.engine.model.source import load_spec, resolve_source


def check(path: Path) -> None:
    source = resolve_source(str(path))
    check_files(source, load_spec(source))


def refused(path: Path, words: str) -> None:
    """In one line with these words."""
    with pytest.raises(ConfigError, match=words) as raised:
        check(path)
    assert str(raised.value).isprintable()
