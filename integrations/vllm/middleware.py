"""SGLang's names on vLLM's HTTP port: bootstrap_host, bootstrap_port and bootstrap_room become kv_transfer_params.

    python -m vllm.entrypoints.openai.api_server ... --middleware headrace.integrations.vllm.middleware.BootstrapNames

vLLM itself skips these fields, and would compute the prompt again.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace.integrations.vllm.params import BOOTSTRAP_PORT

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
NO_TRANSFER_HOST = "2.2.2.2"  # SGLang's name for "nobody fetches this"
MAX_BODY_BYTES = 64 << 20
NAMES = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


class BadNames(Exception):
    """The fields do not name one handoff; the text is for the client."""


class BootstrapNames:
    """An ASGI middleware. Requests without these fields pass as they are."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATHS):
            return await self._app(scope, receive, send)
        body, rest = await _read(receive)
        try:
            changed = None if rest is not None else rename(body)
        except BadNames as error:
            return await _refuse(send, str(error))
        if changed is None:
            return await self._app(scope, _replay(body, rest, receive), send)
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        length = (b"content-length", str(len(changed)).encode())
        return await self._app({**scope, "headers": [*headers, length]}, _replay(changed, None, receive), send)


def rename(body: bytes) -> bytes | None:
    """The body under vLLM's names; None if it names no bootstrap room, or is none of ours to read. Raises BadNames."""
    if b"bootstrap_" not in body:
        return None
    try:
        fields = json.loads(body)
    except ValueError:
        return None  # vLLM says what is wrong with it
    if not isinstance(fields, dict) or not any(fields.get(name) is not None for name in NAMES):
        return None
    host, port, room = (_single(name, fields.pop(name, None)) for name in NAMES)
    if host == NO_TRANSFER_HOST:
        return json.dumps(fields).encode()
    if not isinstance(host, str) or isinstance(room, bool) or not isinstance(room, int):
        raise BadNames("bootstrap_host (a name) and bootstrap_room (an integer) are both required")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int)):
        raise BadNames("bootstrap_port has to be an integer")
    if fields.get("kv_transfer_params"):
        raise BadNames("kv_transfer_params and bootstrap_room name two different handoffs; send one of them")
    address = f"[{host}]" if ":" in host else host
    fields["kv_transfer_params"] = {
        "do_remote_prefill": True,
        "transfer_id": f"room:{room}",
        "remote_bootstrap_addr": f"http://{address}:{port or BOOTSTRAP_PORT}",
    }
    return json.dumps(fields).encode()


def _single(name: str, value: Any) -> Any:
    """vLLM takes one kv_transfer_params for a request, so lists can only have one entry."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise BadNames(f"{name} has {len(value)} entries: vLLM takes one handoff in a request; send prompts one by one")
    return value[0]


async def _read(receive: Receive) -> tuple[bytes, Message | None]:
    """(the body, None), or (as much as is read at all, the message that ended the reading)."""
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
    """What receive() would have said: the body in one piece, then what came after."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": rest is not None}]
    messages += [rest] if rest is not None else []

    async def replayed() -> Message:
        return messages.pop(0) if messages else await receive()

    return replayed


async def _refuse(send: Send, text: str) -> None:
    error = {"message": text, "type": "BadRequestError", "param": "bootstrap_room", "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
