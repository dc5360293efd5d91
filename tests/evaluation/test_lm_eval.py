"""lm-eval's tasks on a pair: what it gets is what transformers computes with the same weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.files import ROOT
from tests.e2e.harness import Server
from tests.engine.models import smollm2, transformers_tokenizer

pytestmark = pytest.mark.evaluation

Pair = tuple[Server, Server]
LENGTH = 512
CLOSE = 2e-3  # of sums over up to a hundred tokens, in float32
IDS = pytest.param({"limit": None}, id="ids")
LISTS = pytest.param({"batch_size": 4}, id="lists-of-ids")
TEXTS = pytest.param({"tokenized_requests": False}, id="texts")
LISTS_OF_TEXTS = pytest.param({"batch_size": 3, "tokenized_requests": False}, id="lists-of-texts")
CONCURRENT = pytest.param({"num_concurrent": 4}, id="concurrent")


@pytest.fixture(autouse=True)
def at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks name their data from there."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def oracle() -> Any:
    from tests.evaluation.harness import Oracle

    return Oracle(smollm2(), transformers_tokenizer("smollm2"))


def evaluated(servers: Pair, tokenizer: Path, task: str, **model_args: Any) -> Any:
    from tests.evaluation.harness import evaluated

    return evaluated(servers[1], tokenizer, task, **{"limit": 2, **model_args})


def answers(result: Any, task: str) -> list[tuple[list[Any], Any]]:
    """What was asked, and what was answered, of every request of a task."""
    found = []
    for sample in result["samples"][task]:
        for number, answer in enumerate(sample["resps"]):
            arguments = sample["arguments"]
            asked = arguments[f"gen_args_{number}"] if isinstance(arguments, dict) else arguments[number]
            found.append((list(asked.values()) if isinstance(asked, dict) else list(asked), answer[0]))
    return found


@pytest.mark.parametrize("model_args", [IDS, LISTS, TEXTS, LISTS_OF_TEXTS, CONCURRENT])
def test_loglikelihoods_of_choices(servers: Pair, tokenizer: Path, oracle: Any, model_args: dict[str, Any]) -> None:
    result = evaluated(servers, tokenizer, "headrace_capitals", **model_args)
    found = answers(result, "headrace_capitals")
    assert len(found) == (18 if "limit" in model_args else 6)
    for (context, continuation), (logprob, greedy) in found:
        expected, expected_greedy = oracle.loglikelihood(context, continuation)
        assert float(logprob) == pytest.approx(expected, abs=CLOSE)
        assert (str(greedy) == "True") == expected_greedy
    assert servers[0].total("headrace_requests_total") > 0, "the prefill server computed the prompts"


@pytest.mark.parametrize("model_args", [IDS, LISTS])
def test_rolling_loglikelihoods(servers: Pair, tokenizer: Path, oracle: Any, model_args: dict[str, Any]) -> None:
    found = answers(evaluated(servers, tokenizer, "headrace_passages", **model_args), "headrace_passages")
    assert len(found) == (5 if "limit" in model_args else 2)
    for (text,), logprob in found:
        assert float(logprob) == pytest.approx(oracle.rolling(text), abs=CLOSE)


@pytest.mark.parametrize("model_args", [IDS, LISTS, TEXTS])
def test_texts_up_to_a_stop(servers: Pair, tokenizer: Path, oracle: Any, model_args: dict[str, Any]) -> None:
    found = answers(evaluated(servers, tokenizer, "headrace_endings", **model_args), "headrace_endings")
    assert len(found) == (4 if "limit" in model_args else 2)
    for (begin, _), text in found:
        whole = oracle.greedy(begin, 16)
        assert text == whole.split("\n")[0].split(".")[0]


def test_the_command_of_the_documents(servers: Pair, tokenizer: Path, oracle: Any, tmp_path: Path) -> None:
    """As it stands in docs/evaluation.md, with the places filled in."""
    block = next(part for part in (ROOT / "docs/evaluation.md").read_text().split("```") if "lm_eval run" in part)
    command = block[block.index("lm_eval run") :].replace("\\\n", " ").split()
    filled = {
        "http://127.0.0.1:8001": servers[1].url,
        "FOLDER": str(tokenizer),
        "model=smollm2": "model=tested",
        "max_length=2048": f"max_length={LENGTH}",
        "TASK": "headrace_capitals",
    }
    for place, value in filled.items():
        assert sum(place in word for word in command) == 1
        command = [word.replace(place, value) for word in command]
    more = ["--include_path", "tests/evaluation/tasks", "--limit", "2", "--output_path", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *command, *more], check=True)
    (path,) = tmp_path.rglob("results*.json")
    accuracy = json.loads(path.read_text())["results"]["headrace_capitals"]["acc,none"]
    right = 0
    for line in (ROOT / "tests/evaluation/tasks/capitals.jsonl").read_text().splitlines()[:2]:
        doc = json.loads(line)
        question = f"Question: What is the capital of {doc['country']}?\nAnswer:"
        scores = [oracle.loglikelihood(question, f" {city}")[0] for city in doc["cities"]]
        right += max(range(len(scores)), key=scores.__getitem__) == doc["answer"]
    assert accuracy == right / 2
