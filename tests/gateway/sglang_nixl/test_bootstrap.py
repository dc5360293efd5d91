"""The bootstrap server as an SGLang decode engine asks it, over HTTP."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from headrace.core.types.errors import ConfigError
from headrace.gateway.sglang_nixl.bootstrap import FORGOTTEN_S, Bootstrap, BootstrapServer, RankAddress, Setup

HERE = "127.0.0.1"
REQUIRED = {
    "attn_tp_size",
    "attn_cp_size",
    "dp_size",
    "pp_size",
    "page_size",
    "kv_cache_dtype",
    "follow_bootstrap_room",
}
OPTIONAL = {
    "enable_dsa_cache_layer_split",
    "dsv41_spec_layout",
    "kv_layout",
    "decode_allocation_policy",
    "enable_kv_cache_sharding",
    "prefill_http_port",
}


NOW = [1000.0]


@pytest.fixture
def server() -> Iterator[tuple[Bootstrap, int]]:
    bootstrap = Bootstrap(Setup(), RankAddress(HERE, 7000), clock=lambda: NOW[0])
    running = BootstrapServer(HERE, 0, bootstrap)
    running.start()
    yield bootstrap, running.port
    running.stop()
    running.join(5)
    assert not running.is_alive()


def ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HERE, port, timeout=5)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def route(dp: str = "-1", cp: str = "-1", tp: str = "-1", pp: str = "-1") -> str:
    return f"/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"


def test_the_setup_has_the_fields_of_0_5_23_and_no_other(server: tuple[Bootstrap, int]) -> None:
    status, body = ask(server[1], "GET", route())
    answer = json.loads(body)
    assert status == 200
    assert set(answer) >= REQUIRED, "PrefillServerInfo has no defaults for these"
    assert set(answer) <= REQUIRED | OPTIONAL, "and takes no others"
    sizes = {name: answer[name] for name in ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size")}
    assert set(sizes.values()) == {1}
    assert (answer["page_size"], answer["kv_cache_dtype"]) == (None, None), "an engine that has others would end"
    assert answer["follow_bootstrap_room"] is True
    assert answer["decode_allocation_policy"] == "early"


def test_ranks(server: tuple[Bootstrap, int]) -> None:
    status, body = ask(server[1], "GET", route("0", "0", "0", "0"))
    assert (status, json.loads(body)) == (200, {"rank_ip": HERE, "rank_port": 7000})
    assert ask(server[1], "GET", route("0", "0", "1", "0"))[0] == 404
    assert ask(server[1], "GET", route("x"))[0] == 400
    assert ask(server[1], "GET", "/route?prefill_dp_rank=0")[0] == 400


def test_health_fails_for_engines_that_have_not_asked_since_the_start_or_are_not_registered(
    server: tuple[Bootstrap, int],
) -> None:
    bootstrap, port = server
    assert ask(port, "GET", "/health")[0] == 503, "an engine that knew the server before it was started again"
    ask(port, "GET", route())
    assert ask(port, "GET", "/health") == (200, "OK")
    bootstrap.forget("127.0.0.9")
    assert ask(port, "GET", "/health")[0] == 200
    bootstrap.forget(HERE)
    assert ask(port, "GET", "/health")[0] == 503


def test_one_engine_that_asks_again_does_not_keep_the_others_at_its_address_from_it(
    server: tuple[Bootstrap, int],
) -> None:
    """Each checks every five seconds, and asks again after two failures."""
    bootstrap, port = server
    ask(port, "GET", route())
    bootstrap.forget(HERE)
    failed = {"first": 0, "second": 0}
    for second in range(1, 25):
        NOW[0] += 1.0
        bootstrap.forget(HERE)  # the messages of the one that has not noticed yet
        for engine, phase in (("first", 1), ("second", 4)):
            if second % 5 == phase and failed[engine] < 2:
                status, _ = ask(port, "GET", "/health")
                failed[engine] = failed[engine] + 1 if status == 503 else 0
                if failed[engine] == 2:
                    ask(port, "GET", route())
        if min(failed.values()) == 2:
            break
    assert second == 9, "when the second has seen its second failure"
    NOW[0] += FORGOTTEN_S
    assert ask(port, "GET", "/health")[0] == 200


def test_data_parallel_ranks_and_what_is_not_served(server: tuple[Bootstrap, int]) -> None:
    port = server[1]
    status, body = ask(port, "POST", "/query_dp_ranks", '{"bootstrap_rooms": [7, 4611686018427387904]}')
    assert (status, json.loads(body)) == (200, {"7": 0, "4611686018427387904": 0})
    assert ask(port, "POST", "/register_dp_rank", '{"bootstrap_room": 7, "dp_rank": 0}') == (200, "OK")
    assert ask(port, "POST", "/query_dp_ranks", '{"bootstrap_rooms": ["x"]}')[0] == 400
    assert ask(port, "POST", "/query_dp_ranks", "x")[0] == 400
    assert ask(port, "POST", "/elsewhere", "{}")[0] == 404
    assert ask(port, "GET", "/elsewhere")[0] == 404
    assert ask(port, "PUT", "/route", "{}")[0] == 501, "no other rank registers here"
    connection = http.client.HTTPConnection(HERE, port, timeout=5)
    connection.putrequest("POST", "/query_dp_ranks")
    connection.putheader("Content-Length", str(1 << 30))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_connection_is_kept(server: tuple[Bootstrap, int]) -> None:
    connection = http.client.HTTPConnection(HERE, server[1], timeout=5)
    for _ in range(3):
        connection.request("GET", route())
        assert connection.getresponse().read()
    connection.close()


def raw(port: int, request: bytes) -> bytes:
    """What comes until the server closes the connection."""
    with socket.create_connection((HERE, port), timeout=5) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        came = b""
        while part := connection.recv(1 << 16):
            came += part
        return came


INNER = b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (route().encode(), len(INNER)), b"200"),
        (b"GET %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % route().encode(), b"200"),
        (
            b"POST /query_dp_ranks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
            b"400",
        ),
        (b"POST /query_dp_ranks HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n", b"400"),
        (b"POST /query_dp_ranks HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\n", b"413"),
    ],
)
def test_a_body_that_is_not_read_is_no_request(server: tuple[Bootstrap, int], head: bytes, status: bytes) -> None:
    came = raw(server[1], head + INNER)
    assert came.startswith(b"HTTP/1.1 " + status)
    assert came.count(b"HTTP/1.1 ") == 1


def test_head_is_get_without_a_body(server: tuple[Bootstrap, int]) -> None:
    connection = http.client.HTTPConnection(HERE, server[1], timeout=5)
    for method in ("HEAD", "GET"):
        connection.request(method, route())
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200
        assert response.headers["Content-Length"] == str(len(body) or int(response.headers["Content-Length"]))
        assert bool(body) == (method == "GET")
    connection.close()


@pytest.mark.parametrize("path", ["/query_dp_ranks", "/register_dp_rank"])
def test_a_body_that_nests_without_end_is_refused(server: tuple[Bootstrap, int], path: str) -> None:
    assert ask(server[1], "POST", path, '{"x":' * 10_000)[0] == 400


def test_idle_connections_give_way_to_new_ones(server: tuple[Bootstrap, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest idle goes first, so that a connection that is used stays."""
    monkeypatch.setattr("headrace.gateway.sglang_nixl.bootstrap.MAX_CONNECTIONS", 8)
    used = http.client.HTTPConnection(HERE, server[1], timeout=5)
    with ExitStack() as idle:
        for _ in range(20):
            used.request("GET", route())
            assert used.getresponse().read(), "it was not closed"
            connection = idle.enter_context(socket.create_connection((HERE, server[1]), timeout=5))
            connection.sendall(b"GET /health HTTP/1.1\r\n")  # and no more
        assert ask(server[1], "GET", route())[0] == 200
    used.close()


def test_a_host_with_many_connections_takes_none_of_another(
    server: tuple[Bootstrap, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.sglang_nixl.bootstrap.MAX_CONNECTIONS", 8)
    other = http.client.HTTPConnection(HERE, server[1], timeout=5, source_address=("127.0.0.2", 0))
    other.request("GET", route())
    assert other.getresponse().read()
    socket_of_other = other.sock
    with ExitStack() as idle:
        for _ in range(20):
            idle.enter_context(socket.create_connection((HERE, server[1]), timeout=5))
        assert ask(server[1], "GET", route())[0] == 200
        other.request("GET", route())
        assert other.getresponse().read()
        assert other.sock is socket_of_other, "on the same connection"
    other.close()


def test_an_address_that_is_taken_is_named(server: tuple[Bootstrap, int]) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {HERE}:{server[1]}"):
        BootstrapServer(HERE, server[1], server[0])
