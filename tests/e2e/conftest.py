"""Models with experts, made once per test run."""

from pathlib import Path

import pytest

from tests.e2e.expert_models import Texts, clear_texts, save_experts


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen3-MoE with a dense layer."""
    return save_experts(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="session")
def expert_texts(experts: Path) -> Texts:
    """What transformers says after prompts where no rounding can change it."""
    return clear_texts(experts)
