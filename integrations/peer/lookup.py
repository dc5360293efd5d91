"""Asking prefill servers over HTTP where their control endpoints are, on threads of their own: names may be slow to
resolve."""

import http.client
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.integrations.peer.commands import Discover, Found

TIMEOUT_S = 5.0
MAX_BYTES = 1 << 16
THREADS = 4


class HandoffEndpoints(msgspec.Struct, frozen=True):
    """What GET /v1/handoff answers, as far as it is needed."""

    control_port: int


class Lookups:
    """Answers each ask() by one call of tell, on another thread. No redirect is followed and no proxy used: the address
    was allowed, others were not. api_key: shown to the server; "" shows none."""

    def __init__(self, tell: Callable[[Found], None], api_key: str) -> None:
        self._tell = tell
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-lookup")

    def ask(self, what: Discover) -> None:
        self._pool.submit(self._answer, what)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, what: Discover) -> None:
        try:
            self._tell(Found(name=what.name, control_port=self._get(what)))
        except (OSError, http.client.HTTPException, ValueError, msgspec.DecodeError) as error:
            reason = f"GET /v1/handoff: {type(error).__name__} {error}"
            self._tell(Found(name=what.name, reason=reason))

    def _get(self, what: Discover) -> int:
        """The control endpoint's port. Raises ValueError when the answer has none."""
        connection = http.client.HTTPConnection(what.host, what.port, timeout=TIMEOUT_S)
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
