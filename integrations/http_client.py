"""httpx clients for traffic between our own servers, which follows nothing of the environment but its certificates.

HTTP_PROXY and its kin are for traffic that leaves the cluster: a proxy would get prompts and API keys, and could not
reach the servers besides; httpx reads no networks in NO_PROXY. A ~/.netrc would put a password in the place of no key.
Whom TLS trusts is the environment's to say: the machine's store, and SSL_CERT_FILE and SSL_CERT_DIR as of OpenSSL.

Requests for an event loop may be cancelled at any moment without leaving a connection behind:

    assigned to a connection ──► connected ──► head sent ──────► response ──► being closed ──► connection idle
    └─ cancelled here: goes on, and ends ─────►┘└─ cancelled here: closed ────►┘└─ here: goes on ─►┘

httpcore keeps a connection for ever when its request is cancelled in the first or in the last of these: it is then
neither idle nor closed, and counts as one that is in use (https://github.com/encode/httpcore/issues/1093, seen in
1.0.9). Clients that leave are everyday life for a server that asks others, so what is cancelled there is let go on, in
a task of its own.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import cache
from typing import Any

import httpx

from headrace.core.types.errors import PREFILL_LOST, PREFILL_UNREACHABLE, ErrorInfo

Trace = Callable[[str, object], Awaitable[None]]
"""httpcore's extension of that name: what happens to a request, as it happens."""
HEAD = "http11.send_request_headers.started"
NOTHING = httpx.ByteStream(b"")  # the body of a response that is closed

PROMPT_TIMEOUT = httpx.Timeout(None, connect=30.0)
"""Of a request that has a prompt computed by a server known to be alive. A busy machine accepts connections late, and a
prompt may wait in a queue for long: the server's own deadlines end it, not HTTP's."""


_WORDS: tuple[tuple[type[Exception], str], ...] = (
    (httpx.ConnectTimeout, "(no connection in time)"),
    (httpx.PoolTimeout, "(no connection was free in time)"),
    (httpx.TimeoutException, "(no answer in time)"),
    (TimeoutError, "(no answer in time)"),
    (httpx.NetworkError, "(the connection ended before the answer did)"),
)


def direct_client(
    *,
    base_url: str = "",
    headers: Mapping[str, str] | None = None,
    timeout: httpx.Timeout | float | None,
    verify: bool = True,
) -> httpx.Client:
    """A client that connects to the host of the URL itself. timeout: seconds. verify: False for a server that is known
    otherwise, such as a child of this process."""
    trusted = trusted_certificates() if verify else False
    return httpx.Client(base_url=base_url, headers=headers, timeout=timeout, verify=trusted, trust_env=False)


def direct_async_client(
    *,
    base_url: str = "",
    headers: Mapping[str, str] | None = None,
    timeout: httpx.Timeout | float | None,
    limits: httpx.Limits | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """The same for an event loop; requests may be cancelled at any moment. limits: httpx's own where there are none.
    transport: in place of the network."""
    if transport is None:
        limits = limits or httpx.Limits(max_connections=100, max_keepalive_connections=20)
        network = httpx.AsyncHTTPTransport(verify=trusted_certificates(), limits=limits, trust_env=False)
        transport = CancellableTransport(network)
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout, transport=transport, trust_env=False)


def connection_error(url: str, error: httpx.HTTPError) -> ErrorInfo:
    """The error of a request whose connection to the prefill server at this URL failed: 502, 504 if it was silent."""
    refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    message = f"prefill server {url}: {failure(error)}"
    status = 504 if isinstance(error, httpx.TimeoutException) else 502
    return ErrorInfo(code=PREFILL_UNREACHABLE if refused else PREFILL_LOST, message=message, status=status)


def failure(error: Exception) -> str:
    """How a request without a response failed, in words: most exceptions of httpx have none of their own."""
    words = str(error) or next((words for kind, words in _WORDS if isinstance(error, kind)), "")
    return f"{type(error).__name__} {words}".rstrip()


def bearer(api_key: str) -> dict[str, str]:
    """The head of a request that shows this key; none for ""."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@cache  # reading them takes longer than all else that a client needs
def trusted_certificates() -> ssl.SSLContext:
    """Authorities of the machine (OpenSSL's paths, SSL_CERT_FILE, SSL_CERT_DIR), and those that httpx brings."""
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context


class GivenUp(Exception):
    """The response is not waited for any more. Reaches no caller."""


class CancellableTransport(httpx.AsyncBaseTransport):
    """An httpx transport that sends requests by another one, each in a task of its own. Used by one event loop."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self._ending: set[asyncio.Task[None]] = set()  # closing responses, and requests that were cancelled

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx.AsyncBaseTransport."""
        moment = _Moment(request.extensions.get("trace"))
        request.extensions = {**request.extensions, "trace": moment.saw}
        sending = asyncio.create_task(self._inner.handle_async_request(request))
        try:
            response = await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._go_on(_end(sending, moment))
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response, response.stream, self._go_on)
        return response

    async def aclose(self) -> None:
        """Close all connections, those that are being made included."""
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._inner.aclose()

    def _go_on(self, ending: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


class _Body(httpx.AsyncByteStream):
    """The body of a response, which is closed to the end. httpx has it refer to the response: once it is closed that no
    longer refers to it, or requests with their prompts would stay until the next full garbage collection."""

    def __init__(
        self,
        response: httpx.Response,
        inner: httpx.AsyncByteStream,
        go_on: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        """go_on: runs a coroutine to its end."""
        self._response = response
        self._inner = inner
        self._go_on = go_on

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        """See httpx.AsyncByteStream."""
        try:
            await asyncio.shield(self._go_on(self._inner.aclose()))
        finally:
            self._response.stream = NOTHING


class _Moment:
    """How far a request has come."""

    def __init__(self, trace: Trace | None) -> None:
        """trace: of the caller, which is told everything."""
        self._trace = trace
        self.begun = False
        """Its head is being sent: cancelling it closes the connection from now on."""
        self.given_up = False

    async def saw(self, event: str, info: object) -> None:
        """See Trace. Raises GivenUp before the head of a request that was given up."""
        if event == HEAD:
            if self.given_up:
                raise GivenUp
            self.begun = True
        if self._trace is not None:
            await self._trace(event, info)


async def _end(sending: "asyncio.Task[httpx.Response]", moment: _Moment) -> None:
    """End a request whose caller was cancelled."""
    moment.given_up = True
    if moment.begun:
        sending.cancel()
    try:
        await asyncio.wait({sending})
    finally:
        sending.cancel()
    if not sending.cancelled() and sending.exception() is None:
        await sending.result().aclose()
