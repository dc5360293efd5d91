"""Several pipeline stages: the same texts, and a group of stages that dies and comes back."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e import gold
from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.models import Model, both
from tests.e2e.strikes import SOON_S, come_back, ranks_of, strike
from tests.e2e.texts import check_alone, check_together, text_of

FLAGS = ("--dtype", "float32", "--chunk-tokens", "64", "--kv-pages", "1024", "--max-model-len", "2048")
TOKENS = 8
LENGTHS = (1, 17, 64, 300)
STUB = "stub:layers=4,us_per_token=100,us_per_plan=2000,vocab=1000,max_len=2048"


def body(prompt: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, **more}


def check_texts(server: Server) -> None:
    """One by one, then all at once."""
    prompts = [gold.story_ids()[:length] for length in LENGTHS]
    expected = {prompt: gold.greedy_text(prompt, TOKENS) for prompt in prompts}
    check_alone(server, expected, TOKENS)
    check_together(server, expected, TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("stages", ["2", "3"])
def test_texts_are_those_of_one_stage(stages: str) -> None:
    with serving("--role", "colocated", "--pp", stages, *FLAGS) as server:
        check_texts(server)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        values = server.metrics()
        for stage in range(int(stages)):
            assert values[f'headrace_stage_busy_seconds_total{{stage="{stage}"}}'] > 0
            passed_on = values[f'headrace_hidden_bytes_total{{stage="{stage}"}}']
            assert (passed_on > 0) == (stage < int(stages) - 1)


@pytest.mark.parametrize("model", both(us_per_token=50))
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("1", "2"), *(pytest.param(*each, marks=pytest.mark.full) for each in (("2", "2"), ("2", "1"), ("1", "3")))],
)
def test_prefill_at_one_degree_and_decode_at_another(model: Model, prefill: str, decode: str) -> None:
    flags = (*FLAGS, *model.flags)
    with pair((*flags, "--pp", prefill), (*flags, "--pp", decode)) as (_, server):
        for length in LENGTHS:
            model.check(server, (length,), TOKENS)
        model.check(server, LENGTHS, TOKENS)


@pytest.mark.full
def test_layers_split_by_hand() -> None:
    with serving("--role", "colocated", "--pp", "3", "--pp-layers", "1,25,4", *FLAGS) as server:
        check_texts(server)


@pytest.mark.full
def test_death_and_silence_of_every_stage() -> None:
    """All in flight fail within seconds, naming the stage; the whole group comes back by itself, texts are right."""
    story = gold.story_ids()
    prompt = story[:100]
    expected = gold.greedy_text(prompt, TOKENS)
    random.seed(3)
    with serving("--role", "colocated", "--pp", "2", "--peer-timeout", "2", "--stage-timeout", "3", *FLAGS) as server:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for stage in (0, 1):
                old = ranks_of(server)

                def blow(victim: psutil.Process = old[stage], number: int = number) -> None:
                    time.sleep(random.uniform(0, 0.3))
                    victim.send_signal(number)

                strike(server, [body(story[i : i + 1900]) for i in range(4)], blow, f"stage {stage}")
                assert server.get("/health").status_code == 200
                assert server.get("/ready").status_code == 503
                come_back(server, old)
                assert len(ranks_of(server)) == 2
                assert text_of(server.post("/v1/completions", body(prompt))) == expected
                wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        server.started()


@pytest.mark.full
@pytest.mark.parametrize("turns", [2, 50])
def test_deaths_and_silences_at_random_moments_under_load(turns: int) -> None:
    """A pair with two stages each: whichever dies or stops, whenever, all in flight end within seconds at both ends,
    nothing leaks, and the pair works again."""
    rng = random.Random(turns)
    bounds = ("--peer-timeout", "2", "--stage-timeout", "3")
    flags = ("--model", STUB, "--pp", "2", *bounds, "--chunk-tokens", "128", "--kv-pages", "1024")
    prompts = [tuple(rng.randrange(3, 1000) for _ in range(rng.randrange(1, 1500))) for _ in range(6)]

    def ask(prompt: tuple[int, ...]) -> httpx.Response:
        return decode.post("/v1/completions", {"prompt": list(prompt), "max_tokens": 24, "temperature": 0})

    def recovered() -> bool:
        return all(server.get("/ready").status_code == 200 for server in (prefill, decode)) and (
            ask(prompts[0]).status_code == 200
        )

    with pair(flags, flags) as (prefill, decode), ThreadPoolExecutor(len(prompts)) as pool:
        expected = [text_of(ask(prompt)) for prompt in prompts]
        for turn in range(turns):
            load = [pool.submit(ask, prompt) for prompt in prompts]
            time.sleep(rng.uniform(0, 0.8))
            victims = ranks_of(rng.choice((prefill, decode)))
            victims[rng.randrange(2)].send_signal(rng.choice((signal.SIGKILL, signal.SIGSTOP)))
            struck = time.monotonic()
            answers = [each.result() for each in load]
            assert time.monotonic() - struck < SOON_S, turn
            for answer, text in zip(answers, expected, strict=True):
                assert answer.status_code in (200, 502, 503), answer.text
                assert answer.status_code != 200 or text_of(answer) == text
            psutil.wait_procs(victims, timeout=10)
            assert not [stage for stage in victims if stage.is_running()], turn
            wait_until(recovered, 60, f"service back in turn {turn}\n{prefill.log}\n{decode.log}")
            assert [text_of(ask(prompt)) for prompt in prompts] == expected
            for server in (prefill, decode):
                wait_until(lambda server=server: pages_in_use(server) == 0, 5, "pages back")
                assert server.metrics().get("headrace_integrity_errors", 0) == 0
        for server in (prefill, decode):
            server.started()
