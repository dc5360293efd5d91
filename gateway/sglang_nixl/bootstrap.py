"""Bootstrap HTTP server: where SGLang decode engines ask how this prefill side is set up, and whether it is there.

    GET /route                 all ranks -1: the set-up; ranks 0: where messages about rooms go
    GET /health                every 5 s; two failures have an engine drop what it knows and ask again
    POST /register_dp_rank, /query_dp_ranks

There is one rank, whatever the stages and ranks of the prefill servers are. An engine registers its memory once, and
not again unless /health fails. So /health fails for those that have not asked for the set-up since this server was
started, or whose messages show that they have not registered here (forget()). Both go by the address that a connection
comes from, which is the same for an engine's HTTP and its messages. What an engine names in its messages is not: it may
be any address of its machine.

Source: CommonKVBootstrapServer and PrefillServerInfo of SGLang 0.5.23, sglang/srt/disaggregation/common/conn.py.
"""

import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.addresses import host_port

RANK_NAMES = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
SETUP = (-1, -1, -1, -1)
OWN_RANK = (0, 0, 0, 0)
MAX_BODY = 1 << 20
MAX_CONNECTIONS = 256  # beyond that the longest idle of the host with the most gives way to a new one
T = TypeVar("T")
IDLE_S = 60.0  # a connection without a request is closed after this; engines ask every 5 s
MAX_ADDRESSES = 4096  # engines' addresses that are remembered
FORGOTTEN_S = 12.0  # two checks of each engine at an address, and some time


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's PrefillServerInfo, without what an engine works out itself; an unknown field is an error there."""

    attn_tp_size: int = 1
    attn_cp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    page_size: int | None = None
    """An engine compares it with its own, and ends if they differ; None: it does not. engine_probe.py compares them."""
    kv_cache_dtype: str | None = None
    """Likewise."""
    follow_bootstrap_room: bool = True
    enable_dsa_cache_layer_split: bool = False
    decode_allocation_policy: str = "early"
    enable_kv_cache_sharding: bool = False
    prefill_http_port: int | None = None
    """Where a retracted request would be posted again; None: nowhere."""


class RankAddress(msgspec.Struct, frozen=True):
    """SGLang's PrefillRankInfo."""

    rank_ip: str
    rank_port: int


class DpRankQuery(msgspec.Struct, frozen=True):
    """Body of POST /query_dp_ranks."""

    bootstrap_rooms: list[int]


class DpRank(msgspec.Struct, frozen=True):
    """Body of POST /register_dp_rank."""

    bootstrap_room: int
    dp_rank: int


class Answer(msgspec.Struct, frozen=True):
    """Status and body; bytes are JSON."""

    status: int
    body: bytes | str


class Bootstrap:
    """The answers of the bootstrap server. Used by several threads."""

    def __init__(self, setup: Setup, rank: RankAddress, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._setup = msgspec.json.encode(setup)
        self._rank = msgspec.json.encode(rank)
        self._lock = threading.Lock()
        self._known: dict[str, None] = {}  # addresses that have asked for the set-up, the oldest first
        self._forgotten: dict[str, float] = {}  # addresses, and until when all of their engines are told so

    def forget(self, address: str) -> None:
        """Engines of this address have to ask for the set-up, and to register, again. All of them are told so for
        FORGOTTEN_S, lest the first one that asks again keeps it from the others."""
        with self._lock:
            if self._clock() >= self._forgotten.get(address, 0.0):
                self._known.pop(address, None)
                _put(self._forgotten, address, self._clock() + FORGOTTEN_S)

    def _is_known(self, address: str) -> bool:
        with self._lock:
            return address in self._known and self._clock() >= self._forgotten.get(address, 0.0)

    def get(self, path: str, client: str) -> Answer:
        """Answer to GET. client: address of the engine."""
        parts = urlsplit(path)
        if parts.path == "/health":
            known = self._is_known(client)
            return Answer(200, "OK") if known else Answer(503, "ask for /route first: this server was started anew")
        if parts.path != "/route":
            return Answer(404, "Not Found")
        query = parse_qs(parts.query)
        try:
            ranks = tuple(int(query[name][0]) for name in RANK_NAMES)
        except (KeyError, ValueError):
            return Answer(400, f"the query has to have the numbers {', '.join(RANK_NAMES)}")
        if ranks == SETUP:
            with self._lock:
                _put(self._known, client, None)
            return Answer(200, self._setup)
        if ranks == OWN_RANK:
            return Answer(200, self._rank)
        return Answer(404, f"there is rank 0 of each kind only, not {dict(zip(RANK_NAMES, ranks, strict=True))}")

    def post(self, path: str, body: bytes) -> Answer:
        """Answer to POST."""
        try:
            if path == "/register_dp_rank":  # for ranks of a prefill engine; there is one here
                msgspec.json.decode(body, type=DpRank)
                return Answer(200, "OK")
            if path == "/query_dp_ranks":
                rooms = msgspec.json.decode(body, type=DpRankQuery).bootstrap_rooms
                return Answer(200, msgspec.json.encode({str(room): 0 for room in rooms}))
        except NO_MESSAGE as error:
            return Answer(400, str(error))
        return Answer(404, "Not Found")


def _put(addresses: dict[str, T], address: str, value: T) -> None:
    """Of too many the oldest is forgotten."""
    addresses[address] = value
    if len(addresses) > MAX_ADDRESSES:
        del addresses[next(iter(addresses))]


class BootstrapServer(threading.Thread):
    """The HTTP server of a Bootstrap, one thread for each connection."""

    def __init__(self, host: str, port: int, bootstrap: Bootstrap) -> None:
        """Raises ConfigError when the address cannot be listened on. port: 0 takes a free one."""
        super().__init__(name="headrace-bootstrap", daemon=True)
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host_port(host, port)}: {error.strerror}; write another address"
            ) from error
        self._server.bootstrap = bootstrap
        self.port = int(self._server.server_address[1])

    def run(self) -> None:
        """Serve until stop()."""
        self._server.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        """Close the listening socket."""
        if self.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    bootstrap: Bootstrap

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, str] = {}  # hosts of the connections, the longest idle first
        super().__init__(address, handler)

    def used(self, connection: socket.socket) -> None:
        """A request has come on this connection."""
        with self._lock:
            host = self._open.pop(connection, None)
            if host is not None:  # else it is being closed
                self._open[connection] = host

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                self._end_one()
            self._open[request] = client_address[0]
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def _end_one(self) -> None:
        """End the longest idle connection of the host with the most: its thread finds it closed."""
        (most, _), *_ = Counter(self._open.values()).most_common(1)
        connection = next(one for one, host in self._open.items() if host == most)
        del self._open[connection]
        with suppress(OSError):  # the other end was faster
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no error of this server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: _Server

    def do_GET(self) -> None:
        self._send(self.server.bootstrap.get(self.path, self.client_address[0]), last=self._has_body())

    do_HEAD = do_GET

    def do_POST(self) -> None:
        length, *others = self.headers.get_all("Content-Length", [""])
        if others or "Transfer-Encoding" in self.headers:
            self._send(
                Answer(400, "one Content-Length, and no Transfer-Encoding, has to say where the body ends"), last=True
            )
        elif not length.isdigit() or int(length) > MAX_BODY:
            self._send(Answer(411 if not length else 413, f"Content-Length {length!r}; at most {MAX_BODY}"), last=True)
        else:
            self._send(self.server.bootstrap.post(self.path, self.rfile.read(int(length))))

    def log_message(self, format: str, *args: Any) -> None:
        """Health checks are not logged."""

    def _has_body(self) -> bool:
        """A body that is not read is not to be taken for the next request."""
        return "Content-Length" in self.headers or "Transfer-Encoding" in self.headers

    def _send(self, answer: Answer, *, last: bool = False) -> None:
        """last: of the connection."""
        self.server.used(self.connection)
        is_json = isinstance(answer.body, bytes)
        body = answer.body if isinstance(answer.body, bytes) else answer.body.encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json" if is_json else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if last:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
