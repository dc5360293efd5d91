"""Tensor-parallel shards as processes: the same tokens, peers of other degrees, ranks that die or stop."""

import re
import signal
import subprocess
from typing import Any

import pytest

from headrace.core.runtime.process import module_command
from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, pages_in_use, pair, running, serving, wait_until
from tests.e2e.models import NAME, sharded_stub
from tests.e2e.strikes import come_back, ranks_of, strike

MODEL = sharded_stub(us_per_token=20)  # 8 query heads, 2 KV heads: with 4 shards, two have each KV head
SLOW = sharded_stub(us_per_token=2000)
FLAGS = ("--chunk-tokens", "64", "--kv-pages", "512", "--max-model-len", "2048", "--threads", "1")
TOKENS = 8
FULL = pytest.mark.full
LENGTHS = (1, 17, 64, 300)


def body(prompt: tuple[int, ...]) -> dict[str, Any]:
    return {"model": NAME, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0}


@pytest.mark.parametrize(
    ("pp", "tp"), [("1", "2"), pytest.param("2", "2", marks=FULL), pytest.param("1", "4", marks=FULL)]
)
def test_texts_are_those_of_one_rank(pp: str, tp: str) -> None:
    with serving("--role", "colocated", "--pp", pp, "--tp", tp, *MODEL.flags, *FLAGS) as server:
        MODEL.check(server, LENGTHS[:1], TOKENS)
        MODEL.check(server, LENGTHS, TOKENS)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        assert len(ranks_of(server)) == int(pp) * int(tp)


@pytest.mark.full
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (("--tp", "4"), ("--tp", "2")),
        pytest.param(("--pp", "2"), ("--tp", "4"), marks=FULL),
        pytest.param(("--pp", "2", "--tp", "2"), (), marks=FULL),
        pytest.param(("--tp", "4"), ("--tp", "4"), marks=FULL),
        pytest.param((), ("--pp", "2", "--tp", "2"), marks=FULL),
    ],
    ids=lambda flags: "".join(flags) or "one rank",
)
def test_prefill_at_one_degree_and_decode_at_another(prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
    flags = (*MODEL.flags, *FLAGS)
    with pair((*flags, *prefill), (*flags, *decode)) as (source, server):
        MODEL.check(server, LENGTHS, TOKENS)
        for each in (source, server):
            wait_until(lambda each=each: pages_in_use(each) == 0, 5, "pages back")


@pytest.mark.full
@pytest.mark.parametrize(
    "struck",
    [
        pytest.param((signal.SIGKILL, 0, 1), id="killed, first shard"),
        pytest.param((signal.SIGKILL, 3, 2), id="killed, other shard of the last stage", marks=FULL),
        pytest.param((signal.SIGSTOP, 1, 2), id="stopped, other shard", marks=FULL),
        pytest.param((signal.SIGSTOP, 0, 2), id="stopped, first shard", marks=FULL),
        pytest.param((signal.SIGSTOP, 2, 2), id="stopped, sampler", marks=FULL),
    ],
)
def test_death_and_silence_of_a_rank(struck: tuple[int, int, int]) -> None:
    """All in flight fail within seconds, naming the rank; all ranks come back by themselves, texts are right."""
    number, rank, pp = struck
    story = SLOW.story()
    flags = (*SLOW.flags, *FLAGS, "--peer-timeout", "2", "--stage-timeout", "3")
    name = f"rank {rank} (stage {rank // 2}, replica 0, shard {rank % 2})"
    with serving("--role", "colocated", "--pp", str(pp), "--tp", "2", *flags) as server:
        old = ranks_of(server)
        strike(server, [body(story[i : i + 1900]) for i in range(3)], lambda: old[rank].send_signal(number), name)
        assert "shards add up through shared memory" in server.log
        come_back(server, old)
        SLOW.check(server, (100,), 2)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        server.started()


@pytest.mark.full
def test_ranks_that_torchrun_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get rank, world size and local rank from it; the server names the ranks that are missing."""
    monkeypatch.setenv("HEADRACE_STAGE_KEY", "a key of this test")
    external = ("--tp", "2", "--stages", "external", "--peer-timeout", "2")
    launcher = None
    server = Server("--role", "colocated", *MODEL.flags, *FLAGS, *external)
    try:
        wait_until(lambda: "waiting for ranks 0 and 1 of 2 to join at" in server.log, 60, f"it waits\n{server.log}")
        found = re.search(r"to join at (tcp://\S+:\d+)", server.log)
        assert found is not None
        torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
        stage = ("-m", "headrace.cli.commands", "stage", "--scheduler", found[1])
        launcher = subprocess.Popen(module_command(*torchrun, *stage))
        with running(server):
            MODEL.check(server, LENGTHS, TOKENS)
        assert launcher.wait(30) == 0
    finally:
        if launcher is not None and launcher.poll() is None:
            launcher.terminate()
            launcher.wait()
