"""A model with experts on a real server: the texts of transformers at one and two stages, and its experts' load."""

from pathlib import Path

import pytest

from tests.e2e.expert_models import FLAGS, TOKENS, Texts
from tests.e2e.harness import pair, serving, wait_until
from tests.e2e.texts import check_alone


@pytest.mark.full
@pytest.mark.parametrize("stages", [1, 2])
def test_texts_are_those_of_transformers_and_every_row_is_counted(
    experts: Path, expert_texts: Texts, stages: int
) -> None:
    with serving("--role", "colocated", "--model", str(experts), "--pp", str(stages), *FLAGS) as server:
        check_alone(server, expert_texts, TOKENS)
        # Prompts and all generated tokens but the last go through two experts of each of three layers.
        tokens = sum(len(prompt) + TOKENS - 1 for prompt in expert_texts)
        wait_until(lambda: server.total("headrace_stage_expert_rows_total") == 2 * 3 * tokens, 10, "rows counted")
        layers = server.get("/debug/experts").json()["layers"]
        assert [each["layer"] for each in layers] == [1, 2, 3]
        assert [sum(each["rows"]) for each in layers] == [2 * tokens] * 3
        assert {len(each["rows"]) for each in layers} == {6}
        values = server.metrics()
        for stage in range(stages):
            assert values[f'headrace_expert_imbalance{{stage="{stage}"}}'] >= 1


@pytest.mark.full
def test_a_prompt_is_handed_over(experts: Path, expert_texts: Texts) -> None:
    with pair(("--model", str(experts), *FLAGS), ("--model", str(experts), *FLAGS)) as (_, server):
        check_alone(server, expert_texts, TOKENS)
