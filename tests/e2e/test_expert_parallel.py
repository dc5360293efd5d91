"""Experts divided among ranks: the texts of transformers whichever replicas are idle, and the death of a rank."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.expert_models import DEEPSEEK_V3, FLAGS, TOKENS, Texts, clear_texts, save_experts, text_after
from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.test_pipeline import stages_of

FULL = pytest.mark.full
SHARED = ("--role", "colocated", "--expert-parallel", "--threads", "1", *FLAGS)
LAYERS, CHOSEN, EXPERTS = 3, 2, 6  # layers with experts, and experts per token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with a dense layer."""
    return save_experts(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def texts(folder: Path) -> Texts:
    """What transformers says after prompts where no rounding can change it."""
    return clear_texts(folder)


def check(server: Server, texts: Texts, replicas: int) -> int:
    """All prompts at once, then each alone at every replica, while the others are idle. Returns the tokens computed."""
    with ThreadPoolExecutor(len(texts)) as pool:
        together = list(pool.map(lambda prompt: text_after(server, prompt), texts))
    assert together == list(texts.values())
    for replica in range(replicas):
        alone = [text_after(server, prompt, data_parallel_rank=replica) for prompt in texts]
        assert alone == list(texts.values())
    return (1 + replicas) * sum(len(prompt) + TOKENS - 1 for prompt in texts)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--dp", "2"), id="dp 2"),
        pytest.param(("--dp", "2", "--tp", "2"), id="dp 2, tp 2"),
        pytest.param(("--dp", "2", "--exchange", "alltoall"), id="dp 2, alltoall", marks=FULL),
        pytest.param(("--dp", "2", "--tp", "2", "--exchange", "allgather"), id="dp 2, tp 2, allgather", marks=FULL),
        pytest.param(("--dp", "2", "--pp", "2"), id="dp 2, pp 2", marks=FULL),
        pytest.param(("--tp", "2"), id="tp 2", marks=FULL),
        pytest.param(("--dp", "2", "--chunking", "dynamic"), id="dp 2, measured", marks=FULL),
    ],
)
def test_texts_are_those_of_transformers(folder: Path, texts: Texts, flags: tuple[str, ...]) -> None:
    replicas = 2 if "--dp" in flags else 1
    with serving("--model", str(folder), "--no-prefix-cache", *SHARED, *flags) as server:
        tokens = check(server, texts, replicas)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        # A token goes through each of its experts once, on whichever rank that is.
        rows = CHOSEN * tokens
        wait_until(lambda: server.total("headrace_stage_expert_rows_total") == LAYERS * rows, 10, "rows counted")
        layers = server.get("/debug/experts").json()["layers"]
        assert [(len(each["rows"]), sum(each["rows"])) for each in layers] == [(EXPERTS, rows)] * LAYERS


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--exchange", "allgather"), id="allgather"),
        pytest.param(("--exchange", "alltoall", "--tp", "2"), id="alltoall, tp 2"),
        pytest.param(("--exchange", "alltoall", "--pp", "2"), id="alltoall, pp 2"),
    ],
)
def test_texts_of_passes_in_halves_are_those_of_transformers(
    folder: Path, texts: Texts, flags: tuple[str, ...]
) -> None:
    overlap = ("--dp", "2", "--overlap", "--overlap-prefill-tokens", "4", "--overlap-decode-tokens", "2")
    with serving("--model", str(folder), "--no-prefix-cache", *SHARED, *overlap, *flags) as server:
        check(server, texts, 2)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        passes = server.metrics()
        assert passes['headrace_overlap_passes_total{result="cut"}'] > 0
        assert passes['headrace_overlap_passes_total{result="idle"}'] > 0


@pytest.mark.full
def test_texts_of_deepseek_v3_are_those_of_transformers(tmp_path: Path) -> None:
    """Latents whole on every shard, shared experts, and routers that choose by groups."""
    texts = clear_texts(save_experts(tmp_path, DEEPSEEK_V3))
    flags = ("--dp", "2", "--tp", "2", "--max-model-len", "256")
    with serving("--model", str(tmp_path), *SHARED, *flags) as server:
        check(server, texts, 2)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")


@pytest.mark.full
def test_prompts_are_handed_over_between_replicas_that_share_experts(folder: Path, texts: Texts) -> None:
    shared = ("--model", str(folder), "--threads", "1", "--dp", "2", "--expert-parallel", *FLAGS)
    with pair(shared, (*shared, "--exchange", "alltoall")) as servers:
        check(servers[1], texts, 2)
        for server in servers:
            wait_until(lambda server=server: pages_in_use(server) == 0, 5, "pages back")


@pytest.mark.full
def test_a_rank_that_is_killed_ends_all_and_all_come_back(folder: Path, texts: Texts) -> None:
    """Also where it has been idle: its experts are missing to the others."""
    flags = ("--dp", "2", "--exchange", "alltoall", "--peer-timeout", "3")
    prompt = max(texts, key=len)
    with serving("--model", str(folder), *SHARED, *flags) as server:
        old = stages_of(server)
        body = {"model": "experts", "prompt": list(prompt), "max_tokens": 340, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, "/v1/completions", {**body, "data_parallel_rank": 0})
            wait_until(lambda: pages_in_use(server) > 0, 20, "work in flight")
            old[1].send_signal(signal.SIGKILL)
        assert answer.result().status_code == 503
        assert "rank 1 (stage 0, replica 1, shard 0)" in answer.result().json()["error"]["message"]
        wait_until(lambda: server.get("/ready").status_code == 200, 60, f"back again\n{server.log}")
        assert not [process for process in old if process.is_running()]
        check(server, texts, 2)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        server.started()
