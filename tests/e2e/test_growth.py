"""What servers hold does not grow with the requests that they have answered: memory, descriptors, threads."""

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.models import NAME, sharded_stub
from tests.e2e.traffic import Traffic
from tests.usage import Usage, usage

FLAGS = (*sharded_stub(us_per_token=20).flags, "--kv-pages", "800", "--chunk-tokens", "256", "--threads", "1")
# A KV pool whose pages have all been written to once, or never, differs by 13 MiB: less than GROWN.
WARM_UP_S = 50.0  # until caches and pools of threads are as large as they get
TRAFFIC_S = 150.0
QUIET_S = 30.0
KEPT_S = 5.0  # httpx's default
GROWN = Usage(anonymous_mib=24.0, descriptors=4, threads=4)
PROMPT = 3000  # tokens, of 128 numbers of 4 bytes each between the stages: 1.5 MiB

Usages = dict[int, Usage]
"""Of all processes of some servers, by process id."""


def quiet(*servers: Server) -> Usages:
    """What the processes hold when all that was asked is over, and the last server has asked for one thing more, by
    which it closes the connections that it kept for longer than KEPT_S."""
    for server in servers:
        wait_until(lambda server=server: pages_in_use(server) == 0, QUIET_S, "pages back")
    time.sleep(KEPT_S + 1)
    assert servers[-1].post("/v1/completions", {"model": NAME, "prompt": [1], "max_tokens": 1}).status_code == 200
    time.sleep(1)
    return {each.pid: usage(each.pid) for server in servers for each in processes(server)}


def processes(server: Server) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *server.children()]


def grown(before: Usages, after: Usages) -> list[str]:
    """What holds more than before, beyond what is allowed."""
    assert before.keys() == after.keys(), "processes have ended, or are new"
    found = []
    for pid, most in before.items():
        more = [now - then for now, then in zip(after[pid], most, strict=True)]
        name = " ".join(psutil.Process(pid).cmdline()[-2:])
        print(name, most, after[pid])
        if any(each > allowed for each, allowed in zip(more, GROWN, strict=True)):
            found.append(f"{name}: {most}, later {after[pid]}")
    return found


@pytest.mark.full
def test_long_prompts_leave_nothing_in_the_stages_of_a_pipeline() -> None:
    """What one stage sends to the next is as large as the prompts: 240 MiB in all."""
    numbers = iter(range(100_000))

    def ask(server: Server, count: int) -> None:
        bodies = [
            {"model": NAME, "prompt": [number % 250, number // 250, 5] * (PROMPT // 3), "max_tokens": 1}
            for number, _ in zip(numbers, range(count), strict=False)
        ]
        with ThreadPoolExecutor(4) as pool:
            statuses = list(pool.map(lambda body: server.post("/v1/completions", body).status_code, bodies))
        assert statuses == [200] * count

    with serving("--role", "colocated", "--pp", "2", *FLAGS) as server:
        ask(server, 40)
        before = quiet(server)
        ask(server, 160)
        found = grown(before, quiet(server))
    assert not found


@pytest.mark.full
@pytest.mark.parametrize("degree", ["--pp", "--tp", "--dp"])
def test_mixed_traffic_leaves_nothing_in_any_process(degree: str) -> None:
    flags = (degree, "2", *FLAGS)
    with pair(flags, flags) as (prefill, decode):
        traffic = Traffic(decode.url, prefill.url)
        with traffic:
            time.sleep(WARM_UP_S)
        before, asked = quiet(prefill, decode), traffic.counts.total()
        with traffic:
            time.sleep(TRAFFIC_S)
        found = grown(before, quiet(prefill, decode))
    print(traffic.counts)
    assert not traffic.wrong, traffic.wrong[:5]
    assert traffic.counts.total() - asked > TRAFFIC_S, "there was traffic"
    assert not found
