"""Requests that are in a phase of their lives when a fault strikes, and stay in it for long enough."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from tests.e2e.harness import Server, wait_until
from tests.faults.load import Asked, Ended, ask, body_of
from tests.faults.pair import Pair

Phase = Literal["waiting", "computing", "transferring", "generating", "all at once", "idle"]
PHASES: tuple[Phase, ...] = get_args(Phase)
LONG = 6000  # tokens of a prompt that takes more than a second to compute
BULKY = 3000  # tokens of a prompt whose KV, 6 MB, is behind a slow link for seconds
SLOW_BYTES_PER_S = 1.5e6
MANY_TOKENS = 250
REACHED_S = 30.0


class Scene:
    """The requests of one phase. complete(): what they still wait for comes. results(): their ends."""

    def __init__(self, pair: Pair, phase: Phase) -> None:
        self._pair, self._phase = pair, phase
        self._asked = Asked()
        self._halves: list[Callable[[], Ended]] = []

    def begin(self) -> None:
        """Send the requests and wait until they are in the phase."""
        for phase, begin in (
            ("waiting", self._waiting), ("generating", self._generating), ("transferring", self._transferring),
            ("computing", self._computing),
        ):  # fmt: skip
            if self._phase in (phase, "all at once"):
                begin()

    def complete(self) -> None:
        """Let the other halves of requests that wait for a peer come, and the network be fast."""
        for half in self._halves:
            self._asked.call(half)
        self._halves.clear()

    def results(self) -> list[Ended]:
        return self._asked.results()

    def close(self) -> None:
        self._asked.close()

    def _waiting(self) -> None:
        """One request that the prefill server knows and no decode server fetches; one the other way round."""
        pair = self._pair
        prompt = pair.texts.prompt(70, 11)
        expected = pair.texts.after(prompt, 4)
        for first, second in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
            body = body_of(prompt, 4, **pair.router_fields(), cache_salt=f"{time.monotonic()}")
            self._asked.ask(first.url, body, expected if first is pair.decode else None)
            late = (second.url, body, expected if second is pair.decode else None)
            self._halves.append(lambda late=late: ask(*late))
        _until(lambda: queued(pair.prefill, "bootstrap") > 0, "a request waits for its decode server")
        _until(lambda: queued(pair.decode, "fetching") > 0, "a request waits for its prefill server")

    def _computing(self) -> None:
        self._long(LONG, 4)
        _until(lambda: queued(self._pair.prefill, "running") > 0, "a prompt is computed")

    def _transferring(self) -> None:
        self._pair.network.slow(SLOW_BYTES_PER_S)
        self._long(BULKY, 4)
        _until(lambda: queued(self._pair.prefill, "inflight") > 0, "KV is on its way")

    def _generating(self) -> None:
        self._long(50, MANY_TOKENS)
        _until(lambda: queued(self._pair.decode, "generating") > 0, "tokens are generated")

    def _long(self, length: int, tokens: int) -> None:
        prompt = self._pair.texts.prompt(length, length)
        body = body_of(prompt, tokens, cache_salt=f"{time.monotonic()}")
        self._asked.ask(self._pair.decode.url, body, self._pair.texts.after(prompt, tokens))


@contextmanager
def scene(pair: Pair, phase: Phase) -> Iterator[Scene]:
    """Requests in a phase, from the beginning of a with block."""
    made = Scene(pair, phase)
    try:
        made.begin()
        yield made
    finally:
        made.close()


def queued(server: Server, phase: str) -> float:
    """Requests of a server in a phase."""
    return server.metrics().get(f'headrace_queue_requests{{queue="{phase}"}}', 0.0)


def _until(reached: Callable[[], bool], what: str) -> None:
    wait_until(reached, REACHED_S, what)
