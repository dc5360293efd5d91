"""More peers than --max-peers: sessions give way, those of a key or host with many before others."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.messages.peers import PeerGone, PeerJoined
from headrace.transfer.control.session import MessageSender
from headrace.transfer.control.session_table import SessionOutcome, SessionTable
from headrace.transfer.protocol.messages import Goodbye, Ping, Refuse, Welcome
from tests.transfer.control.session_table import CONFIG, book, hello, reserve

LIMIT = 64
TIMEOUT_S = CONFIG.peer_timeout_s
GREEDY, HONEST = MessageSender(host="10.0.0.66"), MessageSender(host="10.0.0.1")


class Peers:
    """A control endpoint, and who has sessions there by what it was told."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.made: SessionTable = book(replace(CONFIG, max_peers=limit))
        self.owners: dict[str, str] = {}
        self.routes: dict[str, bytes] = {}
        self.joins = 0

    def hello(self, sender: MessageSender, now: float = 0.0) -> SessionOutcome:
        self.joins += 1
        route = f"route {self.joins}".encode()
        outcome = self.made.receive(route, hello(instance=f"{self.joins:032}"), now, sender)
        for event in outcome.events:
            if isinstance(event, PeerJoined):
                self.owners[event.session], self.routes[event.session] = sender.owner, route
            elif isinstance(event, PeerGone):
                del self.owners[event.session], self.routes[event.session]
        return outcome

    def fill(self, sender: MessageSender, count: int = LIMIT, now: float = 0.0) -> None:
        for _ in range(count):
            assert joins(self.hello(sender, now))

    def reserve(self, now: float = 0.0) -> None:
        """Every peer reserves a ticket."""
        for route in self.routes.values():
            assert self.made.receive(route, reserve(), now).events

    def ping(self, now: float) -> None:
        for route in self.routes.values():
            self.made.receive(route, Ping(number=1), now)

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.owners.values())


def joins(outcome: SessionOutcome) -> bool:
    answers = [message for _, message in outcome.replies if isinstance(message, Welcome | Refuse)]
    [answer] = answers
    return isinstance(answer, Welcome)


@pytest.mark.parametrize("busy", [False, True])
def test_a_host_that_fills_the_server_gives_way_to_another(busy: bool) -> None:
    peers = Peers()
    peers.fill(GREEDY)
    if busy:
        peers.reserve()
    outcome = peers.hello(HONEST)
    assert joins(outcome)
    [goodbye] = [message for _, message in outcome.replies if isinstance(message, Goodbye)]
    assert "came while 64 were here" in goodbye.reason
    assert peers.counts == {GREEDY.owner: LIMIT - 1, HONEST.owner: 1}
    cause = "share" if busy else "idle"
    assert {sample.labels: sample.value for sample in peers.made.counters.snapshot()}[(cause,)] == 1
    for _ in range(3):
        peers.hello(GREEDY, TIMEOUT_S)
    assert peers.counts[HONEST.owner] == 1, "what the greedy host wants more of comes from its own"


def test_one_key_counts_as_one_whatever_hosts_it_comes_from() -> None:
    peers = Peers()
    for host in range(LIMIT):
        assert joins(peers.hello(MessageSender("greedy", f"10.0.1.{host}")))
    peers.reserve()
    assert joins(peers.hello(MessageSender("honest", "10.0.1.1")))
    assert peers.counts["key honest"] == 1


def test_of_one_host_the_session_that_is_idle_for_longest_gives_way() -> None:
    peers = Peers(limit=3)
    for at in (0.0, 1.0, 2.0):
        peers.fill(HONEST, 1, at)
    oldest, second, _ = peers.routes.values()
    peers.made.receive(oldest, reserve(), 2.0)
    peers.ping(2.9)
    assert not joins(peers.hello(HONEST, 3.9)), "the second has been idle for less than the timeout"
    outcome = peers.hello(HONEST, 4.0)
    assert joins(outcome)
    assert [route for route, message in outcome.replies if isinstance(message, Goodbye)] == [second]
    assert not joins(peers.hello(HONEST, 4.1))


def test_busy_sessions_of_one_host_do_not_give_way_to_it() -> None:
    peers = Peers(limit=3)
    peers.fill(HONEST, 3)
    peers.reserve()
    peers.ping(TIMEOUT_S - 0.1)
    assert not joins(peers.hello(HONEST, TIMEOUT_S))


def test_where_each_has_one_session_a_busy_one_stays() -> None:
    peers = Peers(limit=3)
    for number in range(3):
        peers.fill(MessageSender(f"k{number}"), 1)
    peers.reserve()
    assert not joins(peers.hello(MessageSender("another"), 1.0))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.floats(0, 5)), max_size=60))
def test_no_owner_loses_a_session_to_one_with_as_many(steps: list[tuple[int, bool, float]]) -> None:
    peers, now = Peers(limit=6), 0.0
    for owner, busy, wait_s in steps:
        now += wait_s
        peers.ping(now)
        before, sender = peers.counts, MessageSender(f"k{owner}")
        peers.hello(sender, now)
        assert sum(peers.counts.values()) <= 6
        for other, lost in (before - peers.counts).items():
            assert lost == 1
            assert before[other] > before[sender.owner]
        if busy:
            for route in peers.routes.values():
                peers.made.receive(route, reserve(f"{now}"), now)
