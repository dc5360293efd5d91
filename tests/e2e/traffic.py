"""Everything that clients do to a pair, for as long as a block lasts: what is asked, taken back, wrong and left unread.

storm    whole and streamed completions and prefills, many of them taken back
others   one after another: long prompts, choices with logprobs, chats, constraints, mistakes, clients that leave
"""

import itertools
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from headrace.text.tokenizer import load_tokenizer
from tests.e2e.models import NAME, SHARDED_SIZES
from tests.e2e.storm import Storm, make_prompts

ROUND = 40  # requests of the storm between two looks at the clock
JOIN_S = 150.0
LONG = 3000  # tokens
Ask = Callable[[httpx.Client, int], int]
"""Send the request of this number; returns its status."""


class Traffic:
    """counts: answers by kind; wrong: what should not have been answered so."""

    def __init__(self, url: str, prefill_url: str, sizes: str = SHARDED_SIZES, seed: int = 1) -> None:
        """url: of a server that decodes. prefill_url: of the one that it takes its prefill from. sizes: of their stub
        under NAME."""
        prompts = make_prompts(sizes, 100, 300, seed)
        self._storm = Storm(NAME, load_tokenizer(sizes, ""), prompts, seed=seed, taking=0.3, concurrency=8)
        self._urls = url, prefill_url
        self._asked: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._over = threading.Event()
        self._numbers = itertools.count(1)
        self._threads: list[threading.Thread] = []

    @property
    def counts(self) -> Counter[str]:
        return self._storm.outcomes + self._asked

    @property
    def wrong(self) -> list[str]:
        return self._storm.wrong + self._wrong

    def __enter__(self) -> "Traffic":
        self._over.clear()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._strike, self._ask_others)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all that is open has ended."""
        self._over.set()
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()

    def _strike(self) -> None:
        while not self._over.is_set():
            self._storm.run(ROUND, *self._urls)

    def _ask_others(self) -> None:
        ways: dict[str, tuple[Ask, int]] = {
            "long": (self._long, 200),
            "choices": (self._choices, 200),
            "chat": (self._chat, 200),
            "constrained": (self._constrained, 200),
            "mistake": (self._mistake, 400),
            "looks": (self._looks, 200),
            "gone": (self._gone, 0),
        }
        while not self._over.is_set():
            for name, (ask, expected) in ways.items():
                number = next(self._numbers)
                with httpx.Client(base_url=self._urls[0], timeout=JOIN_S, trust_env=False) as http:
                    status = ask(http, number)
                self._asked[name] += 1
                if status != expected:
                    self._wrong.append(f"{name} {number} was answered {status}")

    @staticmethod
    def _long(http: httpx.Client, number: int) -> int:
        """A prompt of which nothing is cached."""
        prompt = [number % 250, number // 250 % 250, 5] * (LONG // 3)
        return http.post("/v1/completions", json=_body(prompt=prompt, max_tokens=1)).status_code

    @staticmethod
    def _choices(http: httpx.Client, number: int) -> int:
        """With a deadline that is as far away as clients like."""
        more: dict[str, Any] = {"n": 2, "logprobs": 3, "temperature": 1, "deadline_s": 1e9}
        return http.post("/v1/completions", json=_body(prompt="x" * (number % 999 + 1), **more)).status_code

    @staticmethod
    def _chat(http: httpx.Client, number: int) -> int:
        messages = [{"role": "user", "content": f"hello {number}"}]
        return http.post("/v1/chat/completions", json=_body(messages=messages, user=f"user {number}")).status_code

    @staticmethod
    def _constrained(http: httpx.Client, number: int) -> int:
        """By a schema that was not seen before."""
        schema = {"enum": [f"value {number}", number]}
        wanted = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
        return http.post("/v1/completions", json=_body(prompt="it is ", response_format=wanted)).status_code

    @staticmethod
    def _mistake(http: httpx.Client, number: int) -> int:
        return http.post("/v1/completions", json=_body(prompt=f"hello {number}", nonsense=number)).status_code

    def _looks(self, http: httpx.Client, number: int) -> int:
        url = self._urls[number % 2]
        paths = ("/metrics", "/status", "/health", "/debug/trace?seconds=0.1")
        return max(http.get(f"{url}{path}").status_code for path in paths)

    @staticmethod
    def _gone(http: httpx.Client, number: int) -> int:
        """A client that sends a request and does not wait for the answer."""
        body = json.dumps(_body(prompt=[number % 250] * 500, max_tokens=50)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        address = urlsplit(str(http.base_url))
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
        return 0


def _body(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 8, "temperature": 0, **more}
