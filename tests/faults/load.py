"""Honest requests under faults, and how each of them ended: with the right text, or with a typed error."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from headrace.text.tokenizer import load_tokenizer
from tests.e2e.models import NAME, StubOracle, spoken

TIMEOUT_S = 60.0  # above every deadline of the servers: a request that takes so long has been forgotten
PAUSE_S = 0.05
HONEST_TOKENS = 4
HONEST_LENGTHS = (1, 17, 33, 64, 90)
RIGHT = "right"
BROKEN = "connection"  # ended by TCP: the server that was asked has died
TYPED = (400, 408, 409, 413, 429, 499, 500, 502, 503, 504)


@dataclass(frozen=True)
class Ended:
    """One end of one request. outcome: RIGHT, "503 code", BROKEN, or what should not be, which starts with WRONG."""

    outcome: str
    at: float
    url: str = ""
    """Of the server that was asked."""
    began: float = 0.0

    @property
    def wrong(self) -> bool:
        return self.outcome.startswith("WRONG")


class Texts:
    """What the model says after prompts; computed once for each."""

    def __init__(self, sizes: str, room: int = 8192) -> None:
        self._oracle = StubOracle(sizes, room)
        self._tokenizer = load_tokenizer(sizes, "")
        self._known: dict[tuple[tuple[int, ...], int], str] = {}
        self._lock = threading.Lock()

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        """Token ids that are the same for the same seed."""
        return tuple((seed * 7919 + at * 104729 + at * at * seed) % 250 for at in range(length))

    def after(self, prompt: tuple[int, ...], tokens: int) -> str:
        """The greedy text."""
        with self._lock:
            if (prompt, tokens) not in self._known:
                self._known[prompt, tokens] = spoken(self._tokenizer, prompt, self._oracle.greedy(prompt, tokens))
            return self._known[prompt, tokens]


def body_of(prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, **more}


def ask(url: str, body: dict[str, Any], expected: str | None) -> Ended:
    """Send a completion and judge its end. expected: None for any text."""
    began = time.monotonic()
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http:
            answer = http.post(f"{url}/v1/completions", json=body)
        outcome = _judge(answer, expected)
    except httpx.TimeoutException:
        outcome = f"WRONG: no end within {TIMEOUT_S:g} s"
    except httpx.TransportError:
        outcome = BROKEN
    return Ended(outcome, time.monotonic(), url, began)


def _judge(answer: httpx.Response, expected: str | None) -> str:
    try:
        found = answer.json()
        if answer.status_code == 200:
            text = found["choices"][0]["text"]
            return RIGHT if expected in (None, text) else f"WRONG: the text is {text!r}, not {expected!r}"
        error = found["error"]
        if answer.status_code in TYPED and error["code"] and error["message"]:
            return f"{answer.status_code} {error['code']}"
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    return f"WRONG: {answer.status_code} {answer.text[:300]}"


@dataclass
class Load:
    """Honest requests for the length of a with block, one after another on each of its threads."""

    url: str
    texts: Texts
    threads: int = 2
    salted: bool = True
    """Every request has a salt of its own, so that its whole prompt is computed."""
    ended: list[Ended] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _numbers: Any = field(default_factory=itertools.count)
    _running: list[threading.Thread] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> "Load":
        self._running = [threading.Thread(target=self._work, daemon=True) for _ in range(self.threads)]
        for thread in self._running:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Wait for those that are open."""
        self._over.set()
        for thread in self._running:
            thread.join(TIMEOUT_S + 10)
            assert not thread.is_alive()

    def served_after(self, moment: float, count: int, timeout_s: float) -> float | None:
        """Wait until so many requests have ended well after a moment. Returns when, None if they do not."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while True:
                good = [each.at for each in self.ended if each.outcome == RIGHT and each.at > moment]
                if len(good) >= count:
                    return sorted(good)[count - 1]
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._news.wait(left)

    def _work(self) -> None:
        while not self._over.is_set():
            number = next(self._numbers)
            length = HONEST_LENGTHS[number % len(HONEST_LENGTHS)]
            prompt = self.texts.prompt(length, length)
            salt = {"cache_salt": f"{id(self)}-{number}"} if self.salted else {}
            ended = ask(self.url, body_of(prompt, HONEST_TOKENS, **salt), self.texts.after(prompt, HONEST_TOKENS))
            with self._news:
                self.ended.append(ended)
                self._news.notify_all()
            self._over.wait(PAUSE_S)


class Asked:
    """Requests that are open together. They are read on threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(32)
        self._futures: list[Future[Ended]] = []

    def ask(self, url: str, body: dict[str, Any], expected: str | None) -> None:
        self._futures.append(self._pool.submit(ask, url, body, expected))

    def call(self, asked: Callable[[], Ended]) -> None:
        self._futures.append(self._pool.submit(asked))

    def results(self) -> list[Ended]:
        """The ends of all of them."""
        found = [future.result(TIMEOUT_S + 20) for future in self._futures]
        self._futures.clear()
        return found

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def counted(ended: Sequence[Ended]) -> Counter[str]:
    return Counter(each.outcome for each in ended)
