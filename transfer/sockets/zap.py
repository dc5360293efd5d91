"""CURVE authentication of connecting peers by their public keys, through libzmq's ZAP (RFC 27).

    peer ──handshake──► libzmq ──inproc, ZAP──► ZapAuthenticator: is its public key in the folder? ──► 200 or 400
                          │ no CURVE, another server's key, malformed                        │
                          └──monitor (connections.py)──► ZapAuthenticator ──► a log line, a counter ◄────┘

The authenticator has no thread: it is read in the loop that owns the socket. Meanwhile libzmq goes on with all other
connections. It gives up a handshake that has no decision after connections.HANDSHAKE_MS.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.utils import z85

from headrace.core.config import TransferConfig
from headrace.core.runtime.rate_limit import LogThrottle
from headrace.core.stats import Counters
from headrace.core.types.errors import ConfigError
from headrace.transfer.sockets.curve_keys import AllowList, KeyPair, read_pair
from headrace.transfer.sockets.zmq_sockets import RECEIVE_BATCH, Context, Socket, take

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"

WRONG_SERVER_KEY = "it does not have this server's public key: correct its --curve-server-key"
# For a peer without keys, libzmq knows a reason or not, depending on which end closes the connection first.
NO_CURVE = "it has begun no CURVE handshake: if it is a peer, give it --curve-key and --curve-server-key"


def own_keys(config: TransferConfig) -> KeyPair | None:
    """This server's CURVE keys; None where it has none. Raises ConfigError if the key file cannot be used."""
    return read_pair(Path(config.curve_key)) if config.curve_key else None


class ZapAuthenticator:
    """Decides which peers may connect to one socket, and logs and counts those that may not.

    A context has one authenticator, for one socket.

    Args:
        keys: this server's.
        folder: has the public keys that may connect; "": none may.
        part: name of the socket in logs and metrics.

    Raises ConfigError if the folder cannot be used, or the context has an authenticator.
    """

    def __init__(self, context: Context, keys: KeyPair, folder: str, part: str) -> None:
        self._keys = keys
        self._folder = folder
        self._allowed = AllowList(Path(folder)) if folder else None
        if self._allowed is not None and not len(self._allowed):
            log.warning("there is no public key in %s yet: no peer can connect", folder)
        self._part = part
        self._log_throttle = LogThrottle()
        self.counters = Counters()
        self._requests = context.socket(zmq.ROUTER)
        self._requests.setsockopt(zmq.LINGER, 0)
        try:
            self._requests.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self._requests.close()
            raise ConfigError(f"another socket of this process decides already who may connect ({error})") from error

    def guard(self, socket: Socket) -> None:
        """Require CURVE of a socket's connections. Call it before the socket is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, self._part.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator, no connection is accepted

    def sockets(self) -> tuple[Socket, ...]:
        """Sockets to poll for reading."""
        return (self._requests,)

    def receive(self, failed: Sequence[int], now: float) -> None:
        """Answer ZAP requests, in a bounded pass; log and count refusals.

        failed: protocol errors of handshakes that have failed, as Connections.receive() returns them.
        """
        for _ in range(RECEIVE_BATCH):
            request = take(self._requests)
            if request is None:
                break
            self._decide(request, now)
        for error in failed:
            wrong_key = error == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
            reason, text = ("wrong_server_key", WRONG_SERVER_KEY) if wrong_key else ("no_curve", NO_CURVE)
            self._refused(reason, "a connection", text, now)  # of an address that libzmq does not tell

    def close(self) -> None:
        """Close the ZAP socket. Call it before the guarded socket is closed."""
        self._requests.close()

    def _decide(self, request: list[bytes], now: float) -> None:
        """Answer one ZAP request (RFC 27): route, empty, version, id, domain, address, routing id, mechanism, key."""
        route, empty, version, number, _, address, _, mechanism, *credentials = request
        known = mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32
        key = z85.encode(credentials[0]).decode() if known else ""
        name = self._allowed.name_of(key) if known and self._allowed is not None else None
        status, text = (b"200", b"OK") if name is not None else (b"400", b"not allowed")
        self._requests.send_multipart([route, empty, version, number, status, text, (name or "").encode(), b""])
        if name is None:
            where = self._folder or "none: this server takes no peers"
            host = address.decode(errors="replace")
            self._refused("not_allowed", host, f"its public key {key} is not among those allowed ({where})", now)

    def _refused(self, reason: str, who: str, text: str, now: float) -> None:
        """Count, and log what was not logged of this peer within the last minute."""
        self.counters.add("handshakes_refused_total", labels=(self._part, reason))
        about = f"refused {who} at the {self._part} socket: {text}"
        if self._log_throttle.due(about, now):
            log.warning("%s", about)
