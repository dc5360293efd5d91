"""Whether passes overlap or each waits for the one before it, the texts are the same."""

import pytest

from headrace.text.tokenizer import load_tokenizer
from tests.e2e.harness import pages_in_use, serving, wait_until
from tests.e2e.storm import Storm, make_prompts
from tests.e2e.test_pipeline import FLAGS, check_texts

NAME = "stub"
SIZES = "stub:layers=6,vocab=1000,max_len=512"
MODEL = f"{SIZES},us_per_token=20,us_per_plan=2000,jitter_percent=100"
OPTIONS = ("--model", MODEL, "--served-model-name", NAME, "--chunk-tokens", "64", "--kv-pages", "400", "--threads", "1")
REQUESTS = 120


def cases(timed: tuple[int, int]) -> list[object]:
    """Stages and depths; all but one of them only in the full run."""
    pairs = [(stages, depth) for stages in (1, 3) for depth in (0, 1, 2)]
    return [pytest.param(*pair, marks=() if pair == timed else pytest.mark.full) for pair in pairs]


@pytest.mark.full
@pytest.mark.parametrize(("stages", "depth"), cases(timed=(3, 0)))
def test_stub_texts(stages: int, depth: int) -> None:
    """Prompts of many lengths at once, each followed by what one runner alone makes of it."""
    storm = Storm(NAME, load_tokenizer(SIZES, ""), make_prompts(SIZES, 60, 300, 1), seed=1, taking=0, concurrency=32)
    with serving("--role", "colocated", "--pp", str(stages), "--pipeline-depth", str(depth), *OPTIONS) as server:
        storm.run(REQUESTS, server.url)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
    assert not storm.wrong, storm.wrong[:5]
    assert storm.outcomes == {"right": REQUESTS}


@pytest.mark.full
@pytest.mark.parametrize("depth", ["0", "2"])
def test_smollm2_texts(depth: str) -> None:
    with serving("--role", "colocated", "--pp", "2", "--pipeline-depth", depth, *FLAGS) as server:
        check_texts(server)
