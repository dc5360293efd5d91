"""More idle connections than a process may open files, to every port: what is in goes on, what is new comes in."""

import resource
import signal

import psutil
import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.crowd import crowd
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.machines import Machine, Stages
from tests.e2e.models import stub

DESCRIPTORS = 1024  # of each process of the server
CROWD = 1100
LENGTHS = (1, 17, 300)
TOKENS = 8
MODEL = stub(us_per_token=0)
EVERY_SOCKET = {"http", "control", "data", "kv_events", "kv_events_replay"}


@pytest.fixture(autouse=True)
def _enough_for_the_crowd() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 7 * CROWD:
        pytest.skip(f"this process may open {hard} files, which is too few for the crowd")


def confined(server: Server) -> Server:
    """Before it has started anything, so that its children are, too."""
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    return server


def most_descriptors(server: Server) -> int:
    return max(process.num_fds() for process in [psutil.Process(server.process.pid), *server.children()])


def shedding(server: Server) -> set[str]:
    """The sockets that have closed connections because there were too many."""
    prefix = 'headrace_connections_closed_total{reason="shed",socket="'
    return {
        name.removeprefix(prefix)[:-2] for name, value in server.metrics().items() if name.startswith(prefix) and value
    }


@pytest.mark.full
def test_a_pair_behind_a_crowd() -> None:
    ports = {name: free_port() for name in ("control", "data", "kv-events", "kv-events-replay", "bootstrap")}
    flags = (f"--{name}-port={port}" for name, port in ports.items())
    with running(confined(Server("--role", "prefill", *MODEL.flags, *flags))) as prefill:
        with (
            crowd(CROWD, prefill.port, *ports.values()),
            running(Server("--role", "decode", "--prefill", prefill.url, *MODEL.flags)) as decode,
        ):
            MODEL.check(decode, LENGTHS, TOKENS)
            wait_until(lambda: shedding(prefill) == EVERY_SOCKET, 10, "every socket has been crowded")
            prefill.child("headrace.engine.stage").send_signal(signal.SIGKILL)
            wait_until(lambda: prefill.get("/ready").status_code == 503, 20, "the stage is missed")
            wait_until(lambda: prefill.ready() and decode.ready(), 60, "the stage is back")
            MODEL.check(decode, LENGTHS, TOKENS)
            assert most_descriptors(prefill) < DESCRIPTORS
        wait_until(lambda: pages_in_use(prefill) == 0, 10, "pages back")
        assert "Traceback" not in prefill.log


@pytest.mark.full
def test_external_stages_join_through_a_crowd() -> None:
    port = free_port()
    flags = ("--stages", "external", "--stage-port", str(port), "--peer-timeout", "2", "--threads", "1")
    server = confined(Server("--role", "colocated", *flags, *MODEL.flags))
    stages = Stages([Machine("127.0.0.1", "127.0.0.1")], port)
    try:
        wait_until(lambda: "to join at" in server.log, 60, "it says where stages join")
        with crowd(CROWD, server.port, port):
            first = stages.start(0)
            server.started()
            MODEL.check(server, LENGTHS, TOKENS)
            first.signal(signal.SIGKILL)
            wait_until(lambda: server.get("/ready").status_code == 503, 20, "the stage is missed")
            stages.start(0)
            server.started()
            MODEL.check(server, LENGTHS, TOKENS)
            assert shedding(server) == {"http", "stages"}
            assert most_descriptors(server) < DESCRIPTORS
        assert server.end() == 0
        assert "Traceback" not in server.log
    finally:
        stages.close()
        print(server.log)
        if server.process.poll() is None:
            server.kill()
        server.close()
