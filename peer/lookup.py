"""Lookup of control ports: GET /v1/handoff of prefill servers, on threads of their own since names resolve slowly.

The API key goes only to HTTP ports that the allow list names itself. Where another server asks for a key, GET /query,
which needs none, says the same.
"""

import http.client
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.core.types.peers.allow_list import Rules, is_named
from headrace.core.types.peers.discovery import parse_query
from headrace.peer.commands import ControlPortReply, LookUpControlPort

TIMEOUT_S = 5.0
MAX_BYTES = 1 << 16  # read of an answer
THREADS = 4


class HandoffEndpoints(msgspec.Struct, frozen=True):
    """The part of the answer of GET /v1/handoff that is needed."""

    control_port: int


class ControlPortLookup:
    """Asks HTTP ports of prefill servers for their control ports. Follows no redirect and uses no proxy: only the given
    address was checked against the allow list."""

    def __init__(self, report: Callable[[ControlPortReply], None], api_key: str, rules: Rules) -> None:
        """report: called once for each ask(), on another thread. api_key: sent to servers that the rules name by host
        and port; "" sends none."""
        self._report = report
        self._rules = rules
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-lookup")

    def ask(self, lookup: LookUpControlPort) -> None:
        """Start a lookup."""
        self._pool.submit(self._answer, lookup)

    def close(self) -> None:
        """Cancel lookups that have not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, lookup: LookUpControlPort) -> None:
        try:
            self._report(ControlPortReply(name=lookup.name, control_port=self._get(lookup)))
        except Exception as error:  # whatever it is, the answer is waited for
            reason = f"lookup over HTTP: {type(error).__name__} {error}"
            self._report(ControlPortReply(name=lookup.name, reason=reason))

    def _get(self, lookup: LookUpControlPort) -> int:
        """The control port. Raises ValueError when the answer has none."""
        named = is_named(self._rules, lookup.host, lookup.port)
        status, body = _fetch(lookup, "/v1/handoff", self._headers if named else {})
        if status == 401 and not named:
            status, body = _fetch(lookup, "/query", {})
            if status == 200:
                return parse_query(body).port
        if status != 200:
            raise ValueError(f"status {status}")
        port = msgspec.json.decode(body, type=HandoffEndpoints).control_port
        if not 1 <= port <= 65535:
            raise ValueError(f"control_port {port}")
        return port


def _fetch(lookup: LookUpControlPort, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """Status and body."""
    connection = http.client.HTTPConnection(lookup.host, lookup.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_BYTES)
    finally:
        connection.close()
