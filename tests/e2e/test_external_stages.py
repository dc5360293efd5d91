"""Stages on several machines, which others start: the same texts, and groups that die and come back."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.core.runtime.process import CONFIGURATION_MISTAKE
from headrace.server.launch.free_port import free_port
from tests.e2e.expert_models import FLAGS as EXPERT_FLAGS
from tests.e2e.expert_models import Texts, text_after
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.machines import SUBNET, Stages, Tree, machines
from tests.e2e.models import NAME, SMOLLM2, Model, both, stub
from tests.e2e.strikes import strike

ROOM = ("--chunk-tokens", "64", "--kv-pages", "1024", "--max-model-len", "2048")
STUB = (*stub(us_per_token=1000).flags, *ROOM)
FLAGS = ("--threads", "1", "--peer-timeout", "2", "--stages", "external")
LENGTHS = (1, 17, 300)
TOKENS = 8
KEY = "a key of these tests"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_STAGE_KEY", KEY)


@contextmanager
def waiting_server(*flags: str, degree: str = "--pp") -> Iterator[tuple[Server, Stages]]:
    """A server that waits for two stages, or replicas, and the machines for them."""
    with machines(2) as where:
        server = Server(degree, "2", *FLAGS, "--stage-host", where[0].gateway, *flags)
        stages: Stages | None = None
        try:
            wait_until(lambda: "to join at" in server.log, 60, f"says where stages join\n{server.log}")
            found = re.search(r"to join at tcp://\S+:(\d+)", server.log)
            assert found is not None
            stages = Stages(where, int(found[1]))
            yield server, stages
        finally:
            if stages is not None:
                stages.close()
            print(server.log)
            if server.process.poll() is None:
                server.kill()
            server.close()


def not_ready(server: Server) -> str:
    """Why it is not, while it is alive."""
    assert server.get("/health").status_code == 200
    answer = server.get("/ready")
    assert answer.status_code == 503
    return str(answer.json()["error"]["message"])


def strike_stage(server: Server, story: tuple[int, ...], victim: Tree, number: int, name: str) -> None:
    """A signal to a stage under load: everything in flight fails within seconds, and names it."""

    def body(prompt: tuple[int, ...]) -> dict[str, Any]:
        return {"model": NAME, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0}

    strike(server, [body(story[i : i + 1900]) for i in range(4)], lambda: victim.signal(number), name)
    # For a moment the reason is the failure alone: stages hear that their group has ended after clients are answered.
    wait_until(lambda: "waiting for stages 0 and 1 of 2 to join" in not_ready(server), 10, "it gathers stages again")


@pytest.mark.full
@pytest.mark.parametrize("model", both(us_per_token=1000))
def test_stages_on_two_machines_die_and_come_back(model: Model) -> None:
    with waiting_server("--role", "colocated", *model.flags, *ROOM) as (server, stages):
        assert "waiting for stages 0 and 1 of 2 to join" in not_ready(server)
        first = stages.start(0)
        wait_until(lambda: "waiting for stage 1 of 2" in not_ready(server), 60, "one has joined")
        second = stages.start(1)
        server.started()
        model.check(server, LENGTHS, TOKENS)

        strike_stage(server, model.story(), second, signal.SIGKILL, "stage 1")
        assert first.ended(10) == 1, "it ends, so that its supervisor starts it again"
        first, second = stages.start_all()
        server.started()
        model.check(server, LENGTHS, TOKENS)

        strike_stage(server, model.story(), first, signal.SIGSTOP, "stage 0")
        assert second.ended(10) == 1
        late = stages.start(1)
        first.signal(signal.SIGCONT)
        assert first.ended(10) == 1, "it has been given up, and is told when it wakes"
        stages.start(0)
        server.started()
        model.check(server, LENGTHS, TOKENS)
        wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")
        assert late.process.poll() is None

        server.process.kill()
        server.ended()
        assert late.ended(30) == 1, "no stage outlives its scheduler"
        assert "the scheduler has been silent" in late.log


@pytest.mark.full
def test_an_orderly_end_is_that_of_the_stages_too() -> None:
    with waiting_server("--role", "colocated", *STUB) as (server, stages):
        trees = stages.start_all()
        with running(server):
            assert server.get("/ready").status_code == 200
        assert [tree.ended(10) for tree in trees] == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize("model", both(us_per_token=50))
def test_replicas_on_two_machines(model: Model) -> None:
    with waiting_server("--role", "colocated", *model.flags, *ROOM, degree="--dp") as (server, stages):
        first, second = stages.start_all()
        server.started()
        model.check(server, LENGTHS, TOKENS)
        for replica in (0, 1):
            prompt = model.story()[:100]
            body = {"model": NAME, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0}
            answer = server.post("/v1/completions", {**body, "data_parallel_rank": replica})
            assert answer.json()["choices"][0]["text"] == model.greedy_text(prompt, TOKENS)
        second.signal(signal.SIGKILL)
        assert first.ended(10) == 1, "a group is all replicas"
        stages.start_all()
        server.started()
        model.check(server, LENGTHS, TOKENS)


@pytest.mark.full
def test_replicas_on_two_machines_share_experts(experts: Path, expert_texts: Texts) -> None:
    flags = ("--model", str(experts), *EXPERT_FLAGS, "--expert-parallel", "--exchange", "allgather")
    with waiting_server("--role", "colocated", "--dtype", "float32", *flags, degree="--dp") as (server, stages):
        stages.start_all()
        server.started()
        for replica in (0, 1):
            found = [text_after(server, prompt, data_parallel_rank=replica) for prompt in expert_texts]
            assert found == list(expert_texts.values())


@pytest.mark.full
def test_decode_servers_fetch_from_stages_on_two_machines() -> None:
    with waiting_server("--role", "prefill", *SMOLLM2.flags, *ROOM) as (prefill, stages):
        stages.start_all()
        allowed = ("--allow-prefill", f"{SUBNET}.0/24", "--allow-prefill", "127.0.0.0/8")
        decode = Server("--role", "decode", "--prefill", prefill.url, *allowed, "--threads", "1", *SMOLLM2.flags, *ROOM)
        with running(prefill), running(decode):
            hosts = re.findall(r"data   tcp://(\S+):\d+  \(stage", prefill.log)
            assert len(set(hosts)) == 2, "each stage has an address of its own"
            SMOLLM2.check(decode, LENGTHS, TOKENS)
            wait_until(
                lambda: decode.total("headrace_bytes_received_total") > 0, 5, "the stages' counters, once a second"
            )


@pytest.mark.full
def test_mistakes_end_a_stage_with_one_line_and_a_status_of_their_own() -> None:
    with waiting_server("--role", "prefill", *STUB) as (server, stages):
        wrong = {
            "HEADRACE_STAGE_KEY": stages.start(0, environment={"HEADRACE_STAGE_KEY": "another"}),
            "--pp 2": stages.start(0, "--world-size", "3"),
            "--transfer-host": stages.start(1, "--transfer-host", "0.0.0.0"),
            "rank 2 does not exist": stages.start(1, "--rank", "2"),
        }
        for words, tree in wrong.items():
            assert tree.ended(60) == CONFIGURATION_MISTAKE
            lines = [line for line in tree.log.splitlines() if line.startswith("headrace: ")]
            assert len(lines) == 1
            assert words in lines[0]
            assert KEY not in tree.log
            assert "Traceback" not in tree.log
        assert "waiting for stages 0 and 1 of 2" in not_ready(server)
        patient = stages.start(0, "--join-timeout", "2")
        assert patient.ended(60) == 1
        assert "not admitted within 2 s: waiting for stage 1 of 2" in patient.log


@pytest.mark.full
@pytest.mark.parametrize(
    "rendezvous",
    [
        ("--master-addr", "127.0.0.1", "--master-port"),
        pytest.param(("--rdzv-backend", "c10d", "--rdzv-endpoint"), marks=pytest.mark.full),
    ],
    ids=["static", "c10d"],
)
def test_torchrun_starts_the_stages_and_starts_them_again(rendezvous: tuple[str, ...]) -> None:
    """The agent hosts the store at which the stages meet, and keeps it over restarts."""
    with waiting_server("--role", "colocated", *SMOLLM2.flags, *ROOM) as (server, stages):
        where = f"127.0.0.1:{free_port()}" if "c10d" in rendezvous else str(free_port())
        launcher = ["torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "5"]
        stage = ["-m", "headrace.cli.commands", "stage", "--scheduler", stages.scheduler(0)]
        agent = stages.run(0, [*launcher, *rendezvous, where, *stage])
        server.started()
        SMOLLM2.check(server, LENGTHS, TOKENS)

        for rank in (0, 1):
            old = workers(agent)
            old[rank].kill()
            wait_until(lambda: server.get("/ready").status_code == 503, 10, "noticed")
            server.started()
            assert not [worker for worker in old if worker.is_running()], "all of them start again"
            assert len(workers(agent)) == 2
            SMOLLM2.check(server, LENGTHS, TOKENS)

        orphans = workers(agent)
        agent.process.kill()
        _, alive = psutil.wait_procs(orphans, timeout=5)
        assert not alive, "they end with the agent"
        wait_until(lambda: server.get("/ready").status_code == 503, 10, "noticed")
        assert server.end() == 0


def workers(agent: Tree) -> list[psutil.Process]:
    """The stages of a launcher, by rank."""
    found = [process for process in agent.processes()[1:] if "stage" in process.cmdline()]
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))
