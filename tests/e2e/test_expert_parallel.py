"""Experts divided among ranks: the texts of transformers whichever replicas are idle, and deaths of ranks."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.expert_models import FLAGS, TOKENS, Texts, clear_texts, family, save_experts, text_after
from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.strikes import come_back, ranks_of, strike

FULL = pytest.mark.full
SHARED = ("--role", "colocated", "--expert-parallel", "--threads", "1", *FLAGS)
LAYERS, CHOSEN, EXPERTS = 3, 2, 6  # layers with experts, and experts per token


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
        pytest.param(("--dp", "2"), id="dp 2", marks=FULL),
        pytest.param(("--dp", "2", "--tp", "2"), id="dp 2, tp 2", marks=FULL),
        pytest.param(("--dp", "2", "--exchange", "alltoall"), id="dp 2, alltoall", marks=FULL),
        pytest.param(("--dp", "2", "--tp", "2", "--exchange", "allgather"), id="dp 2, tp 2, allgather", marks=FULL),
        pytest.param(("--dp", "2", "--pp", "2"), id="dp 2, pp 2", marks=FULL),
        pytest.param(("--tp", "2"), id="tp 2", marks=FULL),
        pytest.param(("--dp", "2", "--chunking", "dynamic"), id="dp 2, measured", marks=FULL),
    ],
)
def test_texts_are_those_of_transformers(experts: Path, expert_texts: Texts, flags: tuple[str, ...]) -> None:
    replicas = 2 if "--dp" in flags else 1
    with serving("--model", str(experts), "--no-prefix-cache", *SHARED, *flags) as server:
        tokens = check(server, expert_texts, replicas)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        # A token goes through each of its experts once, on whichever rank that is.
        rows = CHOSEN * tokens
        wait_until(lambda: server.total("headrace_stage_expert_rows_total") == LAYERS * rows, 10, "rows counted")

        def counted() -> bool:  # the counters of ranks are read at different moments
            layers = server.get("/debug/experts").json()["layers"]
            return [(len(each["rows"]), sum(each["rows"])) for each in layers] == [(EXPERTS, rows)] * LAYERS

        wait_until(counted, 10, "rows by expert")


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
    experts: Path, expert_texts: Texts, flags: tuple[str, ...]
) -> None:
    overlap = ("--dp", "2", "--overlap", "--overlap-prefill-tokens", "4", "--overlap-decode-tokens", "2")
    with serving("--model", str(experts), "--no-prefix-cache", *SHARED, *overlap, *flags) as server:
        check(server, expert_texts, 2)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        pinned = [(prompt, replica) for prompt in expert_texts for replica in range(2)]
        for _ in range(20):  # until both replicas have been busy at once
            with ThreadPoolExecutor(len(pinned)) as pool:
                found = list(pool.map(lambda each: text_after(server, each[0], data_parallel_rank=each[1]), pinned))
            assert found == [expert_texts[prompt] for prompt, _ in pinned]
            passes = server.metrics()
            if passes['headrace_overlap_passes_total{result="cut"}'] > 2:
                break
        assert passes['headrace_overlap_passes_total{result="cut"}'] > 2
        assert passes['headrace_overlap_passes_total{result="idle"}'] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v2", "deepseek-v3"])
def test_texts_of_other_families_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """All layers with experts; latents whole on every shard, shared experts, and routers that choose by groups."""
    texts = clear_texts(save_experts(tmp_path, family(name)))
    flags = ("--dp", "2", "--tp", "2", "--max-model-len", "256")
    with serving("--model", str(tmp_path), *SHARED, *flags) as server:
        check(server, texts, 2)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")


@pytest.mark.full
def test_prompts_are_handed_over_between_replicas_that_share_experts(experts: Path, expert_texts: Texts) -> None:
    shared = ("--model", str(experts), "--threads", "1", "--dp", "2", "--expert-parallel", *FLAGS)
    with pair(shared, (*shared, "--exchange", "alltoall")) as servers:
        check(servers[1], expert_texts, 2)
        for server in servers:
            wait_until(lambda server=server: pages_in_use(server) == 0, 5, "pages back")


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "rank", "tp"),
    [
        pytest.param(signal.SIGKILL, 0, 1, id="killed, of the busy replica"),
        pytest.param(signal.SIGKILL, 1, 1, id="killed, of the idle replica"),
        pytest.param(signal.SIGSTOP, 0, 1, id="stopped, of the busy replica"),
        pytest.param(signal.SIGSTOP, 1, 1, id="stopped, of the idle replica"),
        pytest.param(signal.SIGKILL, 3, 2, id="killed, other shard of the idle replica"),
        pytest.param(signal.SIGSTOP, 3, 2, id="stopped, other shard of the idle replica"),
    ],
)
def test_death_and_silence_of_a_rank_in_an_exchange(
    experts: Path, expert_texts: Texts, number: int, rank: int, tp: int
) -> None:
    """One replica generates, so that all ranks are in exchanges nearly all the time; the experts of the struck one are
    missing to the others."""
    flags = ("--dp", "2", "--tp", str(tp), "--exchange", "alltoall", "--peer-timeout", "2", "--stage-timeout", "3")
    prompt = max(expert_texts, key=len)
    body = {"model": "experts", "prompt": list(prompt), "max_tokens": 340, "temperature": 0, "ignore_eos": True}
    with serving("--model", str(experts), *SHARED, *flags) as server:
        old = ranks_of(server)
        name = f"rank {rank} (stage 0, replica {rank // tp}, shard {rank % tp})"
        strike(server, [{**body, "data_parallel_rank": 0}], lambda: old[rank].send_signal(number), name)
        come_back(server, old)
        check(server, expert_texts, 2)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        server.started()
