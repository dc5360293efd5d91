"""Streamed answers, read while they come."""

import json
import threading
from typing import Any

import httpx


class Stream(threading.Thread):
    """A streamed completion, read on a thread."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._body = f"{url}{path}", {**body, "stream": True}
        self.events: list[Any] = []
        self.failure = ""
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60, trust_env=False) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
        except httpx.TransportError as error:
            self.failure = repr(error)

    def ended(self) -> list[Any]:
        """Its events, once the response has ended as a response should."""
        self.join(60)
        assert not self.is_alive()
        assert not self.failure, self.failure
        return self.events

    def error(self) -> dict[str, Any]:
        """Of the event that has ended it."""
        *_, last, done = self.ended()
        assert done == "[DONE]", done
        found: dict[str, Any] = last["error"]
        return found
