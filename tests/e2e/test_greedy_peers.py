"""A live prefill server, and a host that takes all sessions and reservations that it gets: others are served."""

from contextlib import ExitStack, closing

import pytest

from tests.conformance.client import Client
from tests.e2e.harness import serving, wait_until
from tests.e2e.test_unread import MODEL, hand_over, target_of
from tests.transfer.harness import zmq_context

PEERS = 64  # as --max-peers
RESERVATIONS = 1024  # as --max-tickets-per-peer
GREEDY = 4  # peers that reserve


@pytest.mark.full
def test_a_host_with_all_sessions_and_reservations_keeps_no_other_out() -> None:
    with (
        serving("--role", "prefill", *MODEL, "--peer-timeout", "60") as server,
        zmq_context() as context,
        ExitStack() as attack,
    ):
        target = target_of(server)
        port = target.control_server.rpartition(":")[2]
        other_host = target._replace(control_server=f"tcp://127.0.0.2:0;127.0.0.1:{port}")
        greedy = [attack.enter_context(closing(Client(context, other_host))) for _ in range(PEERS)]
        for peer in greedy:
            assert peer.hello(kv_pages=1024)["type"] == "Welcome"
        for peer in greedy[:GREEDY]:
            for number in range(RESERVATIONS):
                peer.reserve(f"greedy {id(peer)} {number}", tokens=16)
        waiting = "headrace_reservations_waiting"
        wait_until(lambda: server.metrics()[waiting] == GREEDY * RESERVATIONS, 60, "all are reserved")
        with closing(Client(context, target)) as honest:
            assert honest.hello()["type"] == "Welcome"
            data = honest.attached()
            for number in range(5):
                hand_over(honest, data, f"honest {number}")
        assert server.metrics()['headrace_sessions_displaced_total{cause="idle"}'] == 1
        assert "ended a session for a new peer: by-hand had no tickets" in server.log
