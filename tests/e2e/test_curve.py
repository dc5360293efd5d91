"""A pair whose control endpoint and data connections are encrypted, and a decode server that has no key for them."""

from contextlib import closing
from pathlib import Path

import pytest

from headrace.server.config.curve_keys import write_pair
from tests.e2e.harness import Server, pages_in_use, pair, running, serving, wait_until
from tests.e2e.models import Model, both


def keys(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags of a prefill server and of the decode server that it allows."""
    public, secret = write_pair(folder, "prefill")
    _, peer_secret = write_pair(folder / "allowed", "decode-0")
    prefill = ("--curve-key", str(secret), "--curve-allowed", str(folder / "allowed"))
    return prefill, ("--curve-key", str(peer_secret), "--curve-server-key", str(public))


@pytest.mark.full
@pytest.mark.parametrize("model", both(us_per_token=50))
def test_encrypted_texts_are_the_models_own(tmp_path: Path, model: Model) -> None:
    common = (*model.flags, "--transfer-backends", "zmq")
    theirs, ours = keys(tmp_path)
    with pair((*common, *theirs), (*common, *ours, "--threads", "1")) as (prefill, decode):
        model.check(decode, (1, 16, 65, 300), tokens=8)
        for server in (prefill, decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 10, "pages back")
        sent = 'headrace_bytes_sent_total{backend="zmq"}'
        wait_until(lambda: prefill.metrics().get(sent, 0) > 0, 10, "stages tell what they have sent with heartbeats")
        assert not any(count for name, count in prefill.metrics().items() if "handshakes_refused" in name)


@pytest.mark.full
def test_without_a_key_nothing_is_handed_over_and_both_logs_say_why(tmp_path: Path) -> None:
    stub = ("--model", "stub:layers=4,hidden=32")
    theirs, _ = keys(tmp_path)
    with serving("--role", "prefill", *stub, *theirs) as prefill:
        decode = Server("--role", "decode", "--prefill", prefill.url, *stub, "--fallback", "local")
        with running(decode):
            wait_until(lambda: "--curve-server-key" in decode.log, 20, "the decode side's log")
            wait_until(lambda: "no CURVE handshake" in prefill.log, 20, "the prefill side's log")
            refused = 'headrace_handshakes_refused_total{reason="no_curve",socket="control"}'
            wait_until(lambda: prefill.metrics().get(refused, 0) >= 2, 20, "another refusal, counted")
            assert prefill.log.count("no CURVE handshake") == 1
            assert prefill.metrics()["headrace_control_sessions"] == 0


def test_an_allowed_peer_that_is_named_wrongly_says_so_at_the_start(tmp_path: Path) -> None:
    _, ours = keys(tmp_path)
    flags = ("--prefill", "http://127.0.0.1:1", *ours[:2], "--curve-server-key", "nowhere.key")
    with closing(Server("--role", "decode", *flags)) as server:
        assert server.ended() == 2
        assert "cannot read the key file nowhere.key" in server.log
