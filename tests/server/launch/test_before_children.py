"""What a server does before it starts a process: it binds its HTTP ports, and removes what killed servers have left."""

import asyncio
import logging
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fastapi import FastAPI

from headrace.cli import commands as cli
from headrace.core.runtime.process import MISTAKE
from headrace.core.types.errors import ConfigError
from headrace.server.http.connections import HttpConnections
from headrace.server.http.listeners import bind
from headrace.server.http.server import HttpServer
from headrace.server.launch import serve
from headrace.server.launch.free_port import free_port


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where another program listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """serve() sets up the process that it runs in: not that of the tests."""
    monkeypatch.setattr(serve, "configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(serve, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(sys, "set_int_max_str_digits", lambda _: None)
    monkeypatch.setattr(logging.getLogger("httpx"), "level", logging.WARNING)


@pytest.mark.parametrize("flag", ["port", "bootstrap-port"])
def test_a_port_that_is_taken_ends_the_start_before_a_process_is_started(
    taken: int, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def started(*_: object) -> int:
        raise AssertionError("it is too late")

    monkeypatch.setattr(serve, "_serve", started)
    ports = {"port": free_port(), "bootstrap-port": free_port(), flag: taken}
    flags = [word for name, port in ports.items() for word in (f"--{name}", str(port))]
    status = cli.main(["serve", "--role", "prefill", "--model", "stub:layers=1", "--dtype", "float32", *flags])
    line = f"cannot listen on http://127.0.0.1:{taken}: address already in use; write another --{flag}"
    assert capsys.readouterr().err == f"headrace: {line}, or end what listens there\n"
    assert status == MISTAKE
    with socket.create_server(("127.0.0.1", ports["port"] if flag == "bootstrap-port" else free_port())):
        pass  # the port that was free is free again


def test_folders_of_killed_servers_are_removed_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "headrace-killed"
    left.mkdir(0o700)
    (left / "lock").touch()
    (left / "record").touch()
    found: list[Path] | None = None

    async def started(*_: object) -> int:
        nonlocal found
        found = list(tmp_path.iterdir())
        return 0

    monkeypatch.setattr(serve, "_serve", started)
    assert cli.main(["serve", "--model", "stub:layers=1", "--dtype", "float32", "--port", str(free_port())]) == 0
    assert found == [], "and a server has none of its own while it serves"


def test_a_bound_port_is_refused_until_it_listens_and_then_serves() -> None:
    async def main() -> None:
        (listener,) = bind("127.0.0.1", free_port(), "port")
        host, port = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)
        server = HttpServer(FastAPI(), HttpConnections(10), keep_alive_s=60)
        serving = asyncio.ensure_future(server.serve([listener]))
        await server.listens.wait()
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        server.close()
        await serving

    asyncio.run(main())


def test_of_two_servers_that_bind_at_the_same_time_one_is_told_later() -> None:
    """Sockets that may be bound again can be bound to one port as long as none listens."""

    async def main() -> None:
        port = free_port()
        (first,), (second,) = bind("127.0.0.1", port, "port"), bind("127.0.0.1", port, "port")
        with closing(first), closing(second):
            first.listen()
            server = HttpServer(FastAPI(), HttpConnections(10), keep_alive_s=60)
            with pytest.raises(ConfigError, match=f"cannot listen on http://127.0.0.1:{port}: address already in use"):
                await server.serve([second])

    asyncio.run(main())


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machine_is_told(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on http://{host}:8000: .*; write another --host"):
        bind(host, 8000, "port")


def test_a_name_is_bound_at_all_its_addresses() -> None:
    port = free_port()
    listeners = bind("localhost", port, "port")
    try:
        assert ("127.0.0.1", port) in [listener.getsockname() for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
