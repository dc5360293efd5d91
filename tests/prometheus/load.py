"""Requests of every kind of end, and what their clients count."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import httpx

from tests.e2e.harness import Server

End = tuple[str, str, str]  # outcome, reason, route
LONG = list(range(2, 902)) * 8  # a prompt that takes seconds
COMPLETIONS, CHAT, PREFILL, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/prefill", "/generate"


class Clients:
    """Sends requests and counts what came of them, by server."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.ends: dict[str, Counter[End]] = {}
        self.statuses: dict[str, Counter[tuple[str, str]]] = {}
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def ask(self, server: Server, route: str, body: dict[str, Any], choices: int = 1) -> httpx.Response:
        """A request with a whole answer."""
        answer = httpx.post(server.url + route, json=body, timeout=60)
        found = answer.json()
        with self._lock:
            self._count(server, route, str(answer.status_code), *self._end(found, route, answer.status_code, choices))
            if answer.status_code == 200 and route in (COMPLETIONS, CHAT):
                self.prompt_tokens += found["usage"]["prompt_tokens"] * choices  # of each choice
                self.generated_tokens += found["usage"]["completion_tokens"]
        return answer

    def leave(self, server: Server, route: str, body: dict[str, Any]) -> None:
        """A request whose client does not wait for the answer."""
        try:
            httpx.post(server.url + route, json=body, timeout=0.4)
            raise AssertionError("the answer came too early")
        except httpx.ReadTimeout:
            with self._lock:
                self._count(server, route, "499", ("cancelled", "cancelled", route))

    def _end(self, found: dict[str, Any], route: str, status: int, choices: int) -> list[End]:
        if status != 200:
            code = found["error"]["code"]
            outcome = "failed" if status >= 500 else "refused"
            return [(outcome, code, route)]
        if route == PREFILL:
            return [("finished", "discarded", route)]
        if route == GENERATE:
            return [("finished", found["meta_info"]["finish_reason"]["type"], route)]
        return [("finished", choice["finish_reason"], route) for choice in found["choices"]]

    def _count(self, server: Server, route: str, status: str, *ends: End) -> None:
        self.ends.setdefault(server.url, Counter()).update(ends)
        self.statuses.setdefault(server.url, Counter()).update([(route, status)])


def load(clients: Clients, prefill: Server, decode: Server) -> None:
    """Some seconds of requests, eight at a time."""
    prompt = list(range(5, 100))

    def whole(number: int) -> None:
        clients.ask(decode, COMPLETIONS, {"prompt": [*prompt, number], "max_tokens": 8})

    work: list[Callable[[], object]] = [lambda number=number: whole(number) for number in range(60)]  # type: ignore[misc]
    for number in range(6):
        work += [
            lambda: clients.ask(decode, CHAT, {"messages": [{"role": "user", "content": "go"}], "max_tokens": 5}),
            lambda: clients.ask(decode, COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "n": 2, "seed": 1}, 2),
            lambda: clients.ask(decode, COMPLETIONS, {"prompt": "x", "max_token": 1}),
            lambda: clients.ask(decode, CHAT, {"messages": "x"}),
            lambda: clients.ask(prefill, PREFILL, {"prompt_token_ids": prompt, "handoff": "none"}),
            lambda number=number: clients.ask(decode, COMPLETIONS, {"prompt": [number + 2, *LONG], "deadline_s": 0.1}),
            lambda number=number: clients.leave(decode, COMPLETIONS, {"prompt": [number + 20, *LONG]}),
        ]
    work.append(lambda: clients.ask(decode, COMPLETIONS, {"prompt": LONG * 9}))
    work.append(lambda: clients.ask(prefill, PREFILL, {"prompt_token_ids": prompt, "ticket": "of-nobody"}))
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(each) for each in work]:
            done.result()
