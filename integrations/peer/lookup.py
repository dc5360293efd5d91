"""Lookup of control ports: GET /v1/handoff of prefill servers, on threads of their own since names resolve slowly."""

import http.client
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.integrations.peer.commands import ControlPortReply, LookUpControlPort

TIMEOUT_S = 5.0
MAX_BYTES = 1 << 16  # read of an answer
THREADS = 4


class HandoffEndpoints(msgspec.Struct, frozen=True):
    """The part of the answer of GET /v1/handoff that is needed."""

    control_port: int


class ControlPortLookup:
    """Asks HTTP ports of prefill servers for their control ports. Follows no redirect and uses no proxy: only the given
    address was checked against the allow list."""

    def __init__(self, report: Callable[[ControlPortReply], None], api_key: str) -> None:
        """report: called once for each ask(), on another thread. api_key: sent to the server; "" sends none."""
        self._report = report
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
        except (OSError, http.client.HTTPException, ValueError, msgspec.DecodeError) as error:
            reason = f"GET /v1/handoff: {type(error).__name__} {error}"
            self._report(ControlPortReply(name=lookup.name, reason=reason))

    def _get(self, lookup: LookUpControlPort) -> int:
        """The control port. Raises ValueError when the answer has none."""
        connection = http.client.HTTPConnection(lookup.host, lookup.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", "/v1/handoff", headers=self._headers)
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES)
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            port = msgspec.json.decode(body, type=HandoffEndpoints).control_port
        finally:
            connection.close()
        if not 1 <= port <= 65535:
            raise ValueError(f"control_port {port}")
        return port
