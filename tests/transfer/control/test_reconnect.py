"""ControlServer and ControlClient over real sockets: silence, restarts, and connecting again."""

from typing import Any

from msgspec.structs import replace

from headrace.core.messages.peers import ConnectPrefill, PeerGone, PrefillDown, PrefillUp
from headrace.transfer.control.client import ControlClient
from headrace.transfer.control.server import ControlServer
from tests.scarcity import no_descriptors
from tests.transfer.control.harness import CONFIG, Both
from tests.transfer.control.session_table import OFFER, hello
from tests.transfer.harness import CLOCK, Loop, value, zmq_context


def test_pings_keep_a_quiet_session_alive(both: Both) -> None:
    session = both.up.session
    end = CLOCK.now() + 2 * CONFIG.peer_timeout_s
    both.loop.until(lambda: CLOCK.now() >= end)
    assert not both.loop.of(both.control_server, PeerGone)
    assert not both.loop.of(both.control_client, PrefillDown)
    assert both.reserve().session == session


def test_a_peer_that_falls_silent_is_gone_by_the_clock_alone(both: Both) -> None:
    session = both.up.session
    assert both.control_server.tick(CLOCK.now() + 0.4) == []
    [gone] = both.control_server.tick(CLOCK.now() + 10)
    assert gone == PeerGone(session=session, reason="silent for 1 s", name="decode")


def test_a_prefill_server_that_falls_silent_is_down_and_connected_to_again(both: Both) -> None:
    session = both.up.session
    alone = Loop(both.control_client)  # the control endpoint is not turned
    down = alone.wait_for(both.control_client, PrefillDown)
    assert down == PrefillDown(name="p", session=session, reason="silent for 1 s", silent=True)
    again = both.loop.wait_for(both.control_client, PrefillUp, 2)
    assert again.session != session
    assert both.loop.wait_for(both.control_server, PeerGone).session == session  # replaced by the same instance


def test_without_descriptors_a_control_endpoint_is_connected_to_later(context: Any) -> None:
    control_server, control_client = ControlServer(CONFIG, context), ControlClient(CONFIG, context)
    loop = Loop(control_server, control_client)
    control_server.ready(OFFER)
    control_client.ready(hello())
    with no_descriptors():
        loop.apply(control_client, ConnectPrefill(name="p", endpoint=f"tcp://127.0.0.1:{control_server.port}"))
    loop.wait_for(control_client, PrefillUp)
    loop.close()


def test_a_server_that_is_not_ready_is_asked_again_and_reported_once(context: Any) -> None:
    both = Both(context, ready=False)
    both.loop.until(lambda: value(both.control_server.statistics(), "refusals_total", ("control", "not_ready")) >= 3)
    assert len(both.loop.of(both.control_client, PrefillDown)) == 1
    both.control_server.ready(OFFER)
    assert both.up
    both.loop.close()


def test_a_restarted_prefill_server_at_the_same_address_is_down_then_up(context: Any) -> None:
    with zmq_context() as first_process:  # ends without a goodbye: it was killed
        both = Both(context, control_context=first_process)
        first = both.up
    control_server = ControlServer(replace(CONFIG, control_port=both.control_server.port), context)
    control_server.ready(replace(OFFER, instance="q" * 32, data_ports=(7002,)))
    loop = Loop(control_server, both.control_client)
    second = loop.wait_for(both.control_client, PrefillUp)
    [down] = loop.of(both.control_client, PrefillDown)
    assert down.session == first.session
    assert loop.events[both.control_client].index(down) < loop.events[both.control_client].index(second)
    assert second.terms.endpoints == ("tcp://127.0.0.1:7002",)
    loop.close()
