"""Reads the answers of /v1/completions (server-sent events) and /v1/prefill (one JSON object). Pure: times come in."""

from typing import Any

import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.tools.bench.outcome import OK

DONE = b"[DONE]"


class StreamReader:
    """Takes the bytes of one response with their times of arrival. streamed: events, else one object."""

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._rest = b""
        self._done = False
        self.token_s: list[float] = []
        """When each event with text arrived."""
        self.last_s = 0.0
        """When the last event of a choice arrived; the last token may have no text."""
        self.input_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.error: tuple[str, str] | None = None
        """Status and message of an error event."""

    def feed(self, data: bytes, at_s: float) -> None:
        """Take the bytes that arrived at this time."""
        self._rest += data
        if not self._streamed:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), at_s)

    def end(self, status: int, at_s: float) -> tuple[str, str]:
        """The response is complete. Returns the outcome's status and message."""
        if status != 200:
            code, message = _error(self._rest)
            return f"{status} {code}".strip(), message
        if not self._streamed:
            self._take_whole(at_s)
        if self.error is not None:
            return self.error
        if self._streamed and not self._done:
            return "stream cut", "the stream ended without [DONE]"
        if not self.token_s and self.output_tokens:
            self.token_s.append(self.last_s)  # none of the tokens had text: the first came then at the latest
        if not self.token_s:
            return "no token", "the response has no token"
        self.output_tokens = self.output_tokens or len(self.token_s)
        return OK, ""

    def _take_event(self, data: bytes, at_s: float) -> None:
        if data == DONE:
            self._done = True
            return
        try:
            event = msgspec.json.decode(data)
        except NO_MESSAGE:
            self.error = self.error or ("bad event", "an event of the stream is not JSON")
            return
        if "error" in event:
            code, message = _error(data)
            self.error = self.error or (f"stream error {code}".strip(), message)
        if choices := event.get("choices"):
            self.last_s = at_s
            if any(choice.get("text") for choice in choices):
                self.token_s.append(at_s)
        self._take_usage(event)

    def _take_whole(self, at_s: float) -> None:
        try:
            answer = msgspec.json.decode(self._rest)
        except NO_MESSAGE:
            self.error = ("bad answer", "the answer is not JSON")
            return
        self.token_s.append(at_s)
        self.last_s = at_s
        self._take_usage(answer)

    def _take_usage(self, answer: dict[str, Any]) -> None:
        usage = answer.get("usage")
        if not isinstance(usage, dict):
            return
        self.input_tokens = int(usage.get("prompt_tokens") or 0)
        self.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or usage
        self.cached_tokens = int(details.get("cached_tokens") or 0)


def _error(body: bytes) -> tuple[str, str]:
    """Code and message of an error in OpenAI's form; of another form, none and its beginning."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error.get("code") or error.get("type") or ""), str(error.get("message") or "")
    except (*NO_MESSAGE, KeyError, TypeError, AttributeError):
        return "", " ".join(body[:200].decode(errors="replace").split())
