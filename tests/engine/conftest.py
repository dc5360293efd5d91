"""Saved models, made once per test run."""

from collections.abc import Callable

import pytest
import torch

from tests.engine.models import CONFIGS, Saved, save_model


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
