"""Shards of transformers' modules as threads of one process."""

import threading
from typing import Any

import pytest

from headrace.engine.library import decoder


def load_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers changes globals while it loads a model, and shards are processes otherwise."""
    lock, load = threading.Lock(), decoder.load_model

    def locked(*args: Any) -> Any:
        with lock:
            return load(*args)

    monkeypatch.setattr(decoder, "load_model", locked)
