"""A model with experts on a real server: the texts of transformers at one and two stages, and its experts' load."""

from pathlib import Path

import pytest

from tests.e2e.expert_models import FLAGS, TOKENS, Texts, check, clear_texts, save_experts
from tests.e2e.harness import pair, serving, wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with a dense layer."""
    return save_experts(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def texts(folder: Path) -> Texts:
    """What transformers says after prompts where no rounding can change it."""
    return clear_texts(folder)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.full), 2])
def test_texts_are_those_of_transformers_and_every_row_is_counted(folder: Path, texts: Texts, stages: int) -> None:
    with serving("--role", "colocated", "--model", str(folder), "--pp", str(stages), *FLAGS) as server:
        check(server, texts)
        # Prompts and all generated tokens but the last go through two experts of each of three layers.
        tokens = sum(len(prompt) + TOKENS - 1 for prompt in texts)
        wait_until(lambda: server.total("headrace_stage_expert_rows_total") == 2 * 3 * tokens, 10, "rows counted")
        layers = server.get("/debug/experts").json()["layers"]
        assert [each["layer"] for each in layers] == [1, 2, 3]
        assert [sum(each["rows"]) for each in layers] == [2 * tokens] * 3
        assert {len(each["rows"]) for each in layers} == {6}
        values = server.metrics()
        for stage in range(stages):
            assert values[f'headrace_expert_imbalance{{stage="{stage}"}}'] >= 1


def test_a_prompt_is_handed_over(folder: Path, texts: Texts) -> None:
    with pair(("--model", str(folder), *FLAGS), ("--model", str(folder), *FLAGS)) as (_, server):
        check(server, texts)
