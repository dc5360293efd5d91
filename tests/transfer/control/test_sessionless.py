"""Connections that say a Hello and never get a session: bounded in number and in time."""

import select
from contextlib import ExitStack
from typing import Any

import pytest

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import PeerGone
from headrace.core.runtime import process
from headrace.transfer.control.server import ControlServer
from headrace.transfer.protocol.messages import ControlMessage, Ping, Pong, Refuse, Welcome
from headrace.transfer.sockets.listener import NO_SESSION_S
from tests.transfer.control.harness import CONTROL, PATIENT, PEER, Both
from tests.transfer.control.session_table import OFFER, hello
from tests.transfer.harness import CLOCK, Loop, value
from tests.transfer.plain import Plain

UNFIT = PEER.encode(hello(fingerprint="another model", instance="f" * 32))
FITTING = PEER.encode(hello(instance="e" * 32))
LIMIT = 8


def answer(loop: Loop, peer: Plain, message: bytes) -> ControlMessage:
    peer.say(message)
    loop.until(lambda: select.select([peer.socket], [], [], 0)[0])
    return CONTROL.decode(peer.take())


def closed(port: ControlServer, reason: str) -> float:
    return value(port.statistics(), "connections_closed_total", ("control", reason))


def test_refused_hellos_are_bounded_in_number_and_the_oldest_gives_way(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_SESSIONLESS", LIMIT)
    both = Both(context, config=PATIENT)
    session, server = both.up.session, both.control_server
    with ExitStack() as opened:
        crowd = [opened.enter_context(Plain(server.port)) for _ in range(LIMIT)]
        for peer in crowd:
            assert isinstance(answer(both.loop, peer, UNFIT), Refuse)
        for _ in range(2 * LIMIT):
            crowd.append(opened.enter_context(Plain(server.port)))
            assert isinstance(answer(both.loop, crowd[-1], UNFIT), Refuse)
        both.loop.until(lambda: all(peer.closed for peer in crowd[: 2 * LIMIT]))
        assert not any(peer.closed for peer in crowd[2 * LIMIT :])
        assert closed(server, "shed") == 2 * LIMIT
        assert value(server.statistics(), "connections", ("control",)) == LIMIT + 1
        newcomer = opened.enter_context(Plain(server.port))
        assert isinstance(answer(both.loop, newcomer, FITTING), Welcome)
        assert both.reserve().session == session
        assert not both.loop.of(server, PeerGone)
    both.loop.close()


def test_a_refused_hello_holds_its_connection_for_a_limited_time_whatever_follows(context: Any) -> None:
    server = ControlServer(TransferConfig(peer_timeout_s=3600), context)
    loop, started = Loop(server), CLOCK.now()
    with Plain(server.port) as stranger, Plain(server.port) as peer:
        for each in (stranger, peer):
            assert isinstance(answer(loop, each, FITTING), Refuse), "the stages are still loading"
        server.ready(OFFER)
        assert isinstance(answer(loop, peer, FITTING), Welcome)
        assert isinstance(answer(loop, stranger, UNFIT), Refuse)
        deadline = server.next_deadline()
        assert deadline is not None
        assert started <= deadline - NO_SESSION_S <= CLOCK.now()
        server.tick(CLOCK.now() + NO_SESSION_S)
        loop.until(lambda: stranger.closed)
        assert closed(server, "no_session") == 1
        assert answer(loop, peer, PEER.encode(Ping(number=1))) == Pong(number=1)
    loop.close()
