"""Prefill and decode servers that are replaced under load, and clients that go by /ready."""

import json
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import httpx

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import wait_until
from tests.e2e.models import NAME
from tests.faults.load import Texts
from tests.faults.servers import Supervised

SIZES = "stub:layers=4,vocab=1000,max_len=8192"
COMMON = (
    "--dtype",
    "float32",
    "--kv-pages",
    "1500",
    "--chunk-tokens",
    "256",
    "--threads",
    "1",
    "--served-model-name",
    NAME,
)
LENGTHS = (700, 17, 300, 64, 500)
TOKENS = 6
GRACE_S = 5.0
LOOK_S = 0.5  # so late that requests come in the grace


class Balancer:
    """Which servers are ready, as a service of Kubernetes knows it: asked all the time, late by LOOK_S."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._ready = dict.fromkeys(urls, False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def choose(self) -> str:
        """A server that was ready when it was asked last."""
        while True:
            if ready := [url for url, is_ready in self._ready.items() if is_ready]:
                return random.choice(ready)
            assert not self._over.wait(LOOK_S)

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)

    def _look(self) -> None:
        with httpx.Client(timeout=5, trust_env=False, verify=False) as http:
            while not self._over.wait(LOOK_S):
                for url in self._ready:
                    ready = False
                    with suppress(httpx.TransportError):
                        ready = http.get(f"{url}/ready").status_code == 200
                    self._ready[url] = ready


class Always:
    """One address, of a router."""

    def __init__(self, url: str) -> None:
        self._url = url

    def choose(self) -> str:
        return self._url


class Clients:
    """Threads that ask for texts, whole or as streams, one after the other and each over connections that it keeps.
    No request is sent again."""

    def __init__(self, where: Balancer | Always, texts: Texts, threads: int = 4) -> None:
        self.served = 0
        self.failures: list[str] = []
        self._where, self._texts = where, texts
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(seed,), daemon=True) for seed in range(threads)]
        for thread in self._threads:
            thread.start()

    def more(self, count: int) -> None:
        """Wait until so many more requests have been served."""
        served = self.served
        wait_until(lambda: self.served >= served + count or self.failures, 120, f"{count} requests are served")
        assert not self.failures, self.failures

    def close(self) -> None:
        """Wait for the last ones, all of which were served."""
        self._over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()
        assert not self.failures, self.failures

    def _work(self, seed: int) -> None:
        number = 0
        with httpx.Client(timeout=60, trust_env=False, verify=False) as http:
            while not self._over.is_set():
                prompt = self._texts.prompt(LENGTHS[(seed + number) % len(LENGTHS)], seed)
                wanted = self._texts.after(prompt, TOKENS)
                # No prefix of it is cached anywhere.
                body = {"model": NAME, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0}
                body |= {"stream": number % 2 > 0, "cache_salt": f"{seed}-{number}"}
                number += 1
                found = _text(http, self._where.choose(), body)
                with self._lock:
                    self.served += found == wanted
                    self.failures += [] if found == wanted else [f"{found!r} instead of {wanted!r}"]


def _text(http: httpx.Client, url: str, body: dict[str, Any]) -> str:
    """The text, or what is wrong."""
    try:
        response = http.post(f"{url}/v1/completions", json=body)
        if response.status_code != 200:
            return f"{url}: {response.status_code} {response.text}"
        if not body["stream"]:
            return str(response.json()["choices"][0]["text"])
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        if any("error" in chunk for chunk in chunks):
            return f"{url}: {chunks[-1]}"
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    except httpx.TransportError as error:
        return f"{url}: {error!r}"


class Fleet:
    """The servers."""

    def __init__(self, prefills: list[Supervised], decodes: list[Supervised]) -> None:
        self.prefills, self.decodes = prefills, decodes
        self.texts = Texts(SIZES)

    @property
    def servers(self) -> list[Supervised]:
        return [*self.prefills, *self.decodes]

    def settled(self) -> None:
        """Wait until all serve, and know each other."""
        for server in self.servers:
            wait_until(server.ready, 120, f"{server.name} is ready\n{server.story}")
        for decode in self.decodes:
            known = lambda decode=decode: decode.total("headrace_prefill_servers") == len(self.prefills)  # noqa: E731
            wait_until(known, 60, f"{decode.name} knows the prefill servers\n{decode.story}")

    def drain(self, server: Supervised) -> None:
        """Have it end in order."""
        assert server.end(signal.SIGTERM) == 0, server.log
        assert "are left after" not in server.log

    def replace(self, server: Supervised) -> None:
        """Drain it, and start another one in its place."""
        self.drain(server)
        server.revive()
        self.settled()

    def empty(self) -> None:
        """No server that runs holds anything."""
        for server in self.servers:
            if server.process.poll() is None:
                leased = lambda server=server: server.metrics()['headrace_kv_pages{state="leased"}']  # noqa: E731
                wait_until(lambda leased=leased: leased() == 0, 30, f"{server.name} is empty\n{server.log}")


@contextmanager
def fleet(decodes: int = 2, flags: tuple[str, ...] = ()) -> Iterator[Fleet]:
    """Two prefill servers and so many decode servers, for the length of a with block."""
    ports = [free_port() for _ in range(2 + decodes)]
    grace = ("--drain-grace", f"{GRACE_S:g}")
    prefill_flags = ("--role", "prefill", "--model", f"{SIZES},us_per_token=200", *COMMON, *flags)
    known = [flag for port in ports[:2] for flag in ("--prefill", f"http://127.0.0.1:{port}")]
    decode_flags = ("--role", "decode", "--model", f"{SIZES},us_per_token=20,us_per_plan=3000", *COMMON, *known)
    with ExitStack() as stack:
        made = [Supervised(f"prefill {port}", prefill_flags, [port]) for port in ports[:2]]
        made += [Supervised(f"decode {port}", (*decode_flags, *flags, *grace), [port]) for port in ports[2:]]
        for server in made:
            stack.enter_context(closing(server))
        try:
            found = Fleet(made[:2], made[2:])
            found.settled()
            yield found
        finally:
            for server in made:
                print(f"=== {server.name}", server.story, sep="\n")
