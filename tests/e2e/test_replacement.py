"""Servers that are taken away and replaced under load: no request fails."""

import os
import signal
from contextlib import closing

import pytest

from tests.e2e.harness import wait_until
from tests.e2e.models import NAME
from tests.e2e.rolling import Always, Balancer, Clients, fleet
from tests.e2e.streams import Stream


@pytest.mark.full
def test_a_prefill_server_is_taken_away_and_the_decode_server_is_told_twice() -> None:
    """No request fails; a text that is open at the second signal ends with an error event."""
    with fleet(decodes=1) as servers:
        decode = servers.decodes[0]
        with closing(Clients(Always(decode.url), servers.texts)) as clients:
            clients.more(10)
            servers.drain(servers.prefills[0])
            clients.more(10)
        servers.empty()
        body = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 3000, "ignore_eos": True}
        stream = Stream(decode.url, "/v1/completions", body)
        wait_until(lambda: len(stream.events) > 1, 30, "the text has begun")
        decode.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not decode.ready(), 10, "it is not ready")
        decode.process.send_signal(signal.SIGINT)
        assert stream.error()["code"] == "draining"
        assert decode.ended() == 128 + signal.SIGINT, decode.log
        assert "Traceback" not in decode.log


@pytest.mark.full
def test_all_are_replaced() -> None:
    """Prefill and decode servers go and come under load: the ratio of the two is not fixed, and no request fails."""
    with fleet() as servers, closing(Balancer([decode.url for decode in servers.decodes])) as balancer:
        with closing(Clients(balancer, servers.texts)) as clients:
            for server in servers.servers:
                clients.more(20)
                servers.replace(server)
            clients.more(20)
        servers.empty()
        for server in servers.servers:
            assert server.end(signal.SIGTERM) == 0
            assert "Traceback" not in server.story
            assert os.listdir(server.folder) == []
