"""Saved models, made once per test run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.engine.models import CONFIGS, Saved, save_model
from tests.engine.recorded_graphs import Device, recorded_graphs


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """The model of this name in CONFIGS, saved in one file."""
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            made[name] = save_model(CONFIGS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def reshaped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, int], Saved]:
    """The model of this name in CONFIGS with other numbers of query heads and KV heads."""
    made: dict[tuple[str, int, int], Saved] = {}

    def get(name: str, heads: int, kv_heads: int) -> Saved:
        key = (name, heads, kv_heads)
        if key not in made:
            config = CONFIGS[name]
            fields: dict[str, Any] = config.to_dict() | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
            made[key] = save_model(type(config)(**fields), tmp_path_factory.mktemp("model"))
        return made[key]

    return get


@pytest.fixture
def device() -> Iterator[Device]:
    """Records CUDA graphs."""
    with recorded_graphs() as made:
        yield made
