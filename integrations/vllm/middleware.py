"""ASGI middleware for vLLM: SGLang's bootstrap_host, bootstrap_port and bootstrap_room become kv_transfer_params.

    python -m vllm.entrypoints.openai.api_server ... --middleware headrace.integrations.vllm.middleware.BootstrapNames

vLLM itself ignores these fields and would compute the prompt again.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace.core.types.peers.addresses import url
from headrace.integrations.vllm.params import BOOTSTRAP_PORT

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
NO_TRANSFER_HOST = "2.2.2.2"  # SGLang's host for requests without a transfer, such as warm-up
MAX_BODY_BYTES = 64 << 20
NAMES = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


class BadBootstrapFields(Exception):
    """The bootstrap fields do not name one handoff; the text is sent to the client."""


class BootstrapNames:
    """Translates requests to the completion routes; requests without bootstrap fields pass unchanged."""

    def __init__(self, app: App) -> None:
        """app: the ASGI application behind it."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Translate the body of a completions request; pass everything else through."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATHS):
            return await self._app(scope, receive, send)
        body, rest = await _read(receive)
        try:
            changed = None if rest is not None else translate(body)
        except BadBootstrapFields as error:
            return await _refuse(send, str(error))
        if changed is None:
            return await self._app(scope, _replay(body, rest, receive), send)
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        length = (b"content-length", str(len(changed)).encode())
        return await self._app({**scope, "headers": [*headers, length]}, _replay(changed, None, receive), send)


def translate(body: bytes) -> bytes | None:
    """A request body with kv_transfer_params in place of bootstrap fields; None if it has none, or is no JSON object.

    Raises BadBootstrapFields.
    """
    if b"bootstrap_" not in body:
        return None
    try:
        fields = json.loads(body)
    except ValueError:
        return None  # vLLM reports the error
    if not isinstance(fields, dict) or not any(fields.get(name) is not None for name in NAMES):
        return None
    host, port, room = (_single(name, fields.pop(name, None)) for name in NAMES)
    if host == NO_TRANSFER_HOST:
        return json.dumps(fields).encode()
    if not isinstance(host, str) or isinstance(room, bool) or not isinstance(room, int):
        raise BadBootstrapFields("bootstrap_host (a name) and bootstrap_room (an integer) are both required")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int)):
        raise BadBootstrapFields("bootstrap_port has to be an integer")
    if fields.get("kv_transfer_params"):
        raise BadBootstrapFields("kv_transfer_params and bootstrap_room name two different handoffs; send one of them")
    fields["kv_transfer_params"] = {
        "do_remote_prefill": True,
        "transfer_id": f"room:{room}",
        "remote_bootstrap_addr": url("http", host, port or BOOTSTRAP_PORT),
    }
    return json.dumps(fields).encode()


def _single(name: str, value: Any) -> Any:
    """The value or the only entry of a list: vLLM takes one kv_transfer_params per request. Raises
    BadBootstrapFields."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise BadBootstrapFields(
            f"{name} has {len(value)} entries: vLLM takes one handoff in a request; send prompts one by one"
        )
    return value[0]


async def _read(receive: Receive) -> tuple[bytes, Message | None]:
    """(the whole body, None), or (what was read of it, the message that ended reading: too large, or a disconnect)."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts), message
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body", False):
            return b"".join(parts), None
        if size > MAX_BODY_BYTES:
            return b"".join(parts), await receive()


def _replay(body: bytes, rest: Message | None, receive: Receive) -> Receive:
    """A receive() that returns the body in one message, then rest, then what receive() returns."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": rest is not None}]
    messages += [rest] if rest is not None else []

    async def replayed() -> Message:
        return messages.pop(0) if messages else await receive()

    return replayed


async def _refuse(send: Send, text: str) -> None:
    """Answer with status 400 and an OpenAI error object."""
    error = {"message": text, "type": "BadRequestError", "param": "bootstrap_room", "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
