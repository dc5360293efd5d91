"""Prompts that several prefill servers finish: one dies, drains or stops in the middle, another goes on from there.

Which server has a prompt, and how far it is, is asked of the servers (GET /status); what was computed twice is counted
by their metrics. Bits are compared with those of a prompt that one server has computed whole.
"""

import hashlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from headrace.core.types.kv.geometry import CacheShape, Geometry
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.models import NAME, SMOLLM2, Model, stub
from tests.e2e.peer import joined

PAGE = 16
CHUNK = 32
CHUNKS = 16
LENGTH = CHUNK * CHUNKS
TOKENS = 6
FLAGS = ("--page-size", str(PAGE), "--kv-pages", "512", "--chunk-tokens", str(CHUNK), "--max-model-len", "2048")
POLL_S = 0.004
ATTEMPTS = 10  # prompts until a look falls between two passes
DETECTION_S = 0.5  # of a dead process on the same machine, its next attempt and the way of what has come
STUB = stub(us_per_token=2000)


class Trio:
    """A decode server and two prefill servers. prefills: by URL; one that has died is started again under its own."""

    def __init__(self, model: Model, flags: tuple[str, ...] = (), decode_flags: tuple[str, ...] = ()) -> None:
        self.model = model
        self._flags = (*model.flags, *FLAGS, *flags)
        self.prefills = {server.url: server for server in (self._prefill(), self._prefill())}
        named = [flag for url in self.prefills for flag in ("--prefill", url)]
        self.decode = Server("--role", "decode", "--kv-return", *named, *decode_flags, *self._flags)
        self._pool = ThreadPoolExecutor(1)

    def started(self) -> "Trio":
        for server in (*self.prefills.values(), self.decode):
            server.started()
        self.known()
        self.geometry = geometry_of(self.decode)
        return self

    def known(self) -> None:
        wait_until(lambda: self.decode.total("headrace_prefill_servers") == 2, 60, "two prefill servers are known")

    def again(self, victim: Server) -> None:
        """Start a server again that has died."""
        victim.close()
        self.prefills[victim.url] = self._prefill(victim.port)
        self.prefills[victim.url].started()
        self.known()

    def ask(self, prompt: tuple[int, ...], salt: str) -> "Future[tuple[str, float]]":
        """The text, and the seconds that it took."""
        self.ended()
        body = {"model": NAME, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "cache_salt": salt}

        def post() -> tuple[str, float]:
            began = time.monotonic()
            answer = self.decode.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (
                "all of it was computed for it"
            )
            return str(answer.json()["choices"][0]["text"]), time.monotonic() - began

        return self._pool.submit(post)

    def ended(self) -> None:
        """Wait until the prompt before has ended at its prefill server, too, a little after its answer."""
        wait_until(lambda: all(computed_by(server) < 0 for server in self.prefills.values()), 10, "no prompt is left")

    def computing(self, tokens: int) -> tuple[Server, int]:
        """Wait until a prefill server has computed so many tokens of the prompt: that server, and how many it has."""
        found = self.caught(tokens, Future())
        assert found is not None, "only an answer ends it without"
        return found

    def caught(self, tokens: int, asked: "Future[tuple[str, float]]") -> tuple[Server, int] | None:
        """As computing(); None if the prompt was answered before a look could see that."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not asked.done():
            for server in self.prefills.values():
                if server.process.poll() is None and (computed := computed_by(server)) >= tokens:
                    return server, computed
            time.sleep(POLL_S)
        assert asked.done(), f"no server has computed {tokens} tokens"
        return None

    def sound(self, victim: Server) -> Server:
        return next(server for server in self.prefills.values() if server is not victim)

    def resumed(self) -> int:
        return int(self.decode.total("headrace_resumed_tokens_total"))

    def cached_kv(self, prompt: tuple[int, ...], salt: str) -> np.ndarray:
        """The KV of a prompt's whole pages that the decode server has in its prefix cache."""
        whole = len(prompt) // PAGE * PAGE
        body = {"prompt_token_ids": prompt[:whole], "ticket": f"kv-{salt}", "cached_only": True, "cache_salt": salt}
        return self._kv(self.decode, body, whole)

    def whole_kv(self, server: Server, prompt: tuple[int, ...]) -> np.ndarray:
        """The KV of the same pages, computed by one server in one go."""
        body = {"prompt_token_ids": prompt, "ticket": "whole", "cache_salt": "whole", "temperature": 0}
        whole = len(prompt) // PAGE * PAGE
        return self._kv(server, body, len(prompt))[:, :, :, :whole]

    def _kv(self, server: Server, body: dict[str, Any], tokens: int) -> np.ndarray:
        with joined(server, self.geometry) as peer, ThreadPoolExecutor(1) as pool:
            posted = pool.submit(server.post, "/v1/prefill", body)
            peer.reserve(body["ticket"], tokens)
            kv, _ = peer.receive(tokens)
            assert posted.result().status_code == 200, posted.result().text
        return kv

    def _prefill(self, port: int = 0) -> Server:
        return Server("--role", "prefill", "--accept-return", "127.0.0.1", *self._flags, port=port)

    def close(self) -> None:
        for server in (self.decode, *self.prefills.values()):
            print(server.log)
            if server.process.poll() is None:
                server.kill()
            server.close()


@contextmanager
def trio(model: Model, *flags: str, decode_flags: tuple[str, ...] = ()) -> Iterator[Trio]:
    with closing(Trio(model, flags, decode_flags)) as made:
        yield made.started()


def geometry_of(server: Server) -> Geometry:
    shape = msgspec.convert(server.get("/v1/handoff").json()["kv_cache"], CacheShape)
    return Geometry(shape.dtype, shape.layers, shape.kv_heads, shape.head_dim, PAGE)


def computed_by(server: Server) -> int:
    """Tokens of its only prompt that a server has computed; -1 where it computes none."""
    requests = server.get("/status").json()["scheduler"]["requests"]
    return max((int(one["computed_tokens"]) for one in requests if one["phase"] == "running"), default=-1)


def killed(server: Server) -> int:
    """SIGKILL to all processes of a server. Returns the tokens that it had computed: its stages stop first."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    server.child("headrace.engine.stage").send_signal(signal.SIGSTOP)
    time.sleep(2 * POLL_S)  # for what they have said last
    computed = computed_by(server)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait()
    return computed


def digest(kv: np.ndarray) -> str:
    return hashlib.sha256(kv.tobytes()).hexdigest()


def prompt_of(model: Model, number: int, length: int = LENGTH) -> tuple[int, ...]:
    """A prompt that begins with no other one's first page."""
    return (model.story()[number], *model.story()[: length - 1])


def check_counts(fleet: Trio, sound: Server, before: dict[str, float], computed: int, kept: int) -> None:
    """At most one chunk was computed twice, and the second server has computed what the first had not sent."""
    assert computed - kept <= CHUNK, f"{computed} tokens were computed, {kept} have come"
    after = sound.metrics()
    fetched = 'headrace_prefix_fetched_tokens_total{source="resume"}'
    assert after[fetched] - before[fetched] == kept
    tokens = after["headrace_prompt_tokens_total"] - before["headrace_prompt_tokens_total"]
    cached = after["headrace_cached_tokens_total"] - before["headrace_cached_tokens_total"]
    assert (tokens, cached) == (LENGTH, kept)
    wait_until(lambda: pages_in_use(fleet.decode) == 0 == pages_in_use(sound), 10, "pages are back")


class Caught:
    """A prompt that is asked for, and a server that was seen to have computed so many chunks of it, and not all."""

    def __init__(self, fleet: Trio, number: int, chunks: int) -> None:
        for attempt in range(ATTEMPTS):
            self.prompt, self.salt = prompt_of(fleet.model, number + 100 * attempt), f"s{number}-{attempt}"
            fleet.ended()
            self.resumed = fleet.resumed()
            self.metrics = {url: server.metrics() for url, server in fleet.prefills.items()}
            self.asked = fleet.ask(self.prompt, self.salt)
            if (seen := fleet.caught(chunks * CHUNK, self.asked)) is not None:
                break
            self.asked.result()
        assert seen is not None, f"no look in {ATTEMPTS} prompts has seen {chunks} chunks computed, and not all"
        self.server, _ = seen


def strike(fleet: Trio, number: int, chunks: int, blow: Callable[[Server], int]) -> tuple[Server, int, float]:
    """Have a prompt computed, and strike its server once it has computed so many chunks: the server, the tokens that
    had come, and the seconds from the blow to the answer. blow: returns how many tokens the server had computed."""
    caught = Caught(fleet, number, chunks)
    began = time.monotonic()
    computed = blow(caught.server)
    text, _ = caught.asked.result(120)
    seconds = time.monotonic() - began
    assert text == fleet.model.greedy_text(caught.prompt, TOKENS)
    kept, sound = fleet.resumed() - caught.resumed, fleet.sound(caught.server)
    check_counts(fleet, sound, caught.metrics[sound.url], computed, kept)
    if fleet.model is SMOLLM2:  # the tokens of the stub show each wrong page
        assert digest(fleet.cached_kv(caught.prompt, caught.salt)) == digest(fleet.whole_kv(sound, caught.prompt))
    return caught.server, kept, seconds


def undisturbed_s(fleet: Trio, number: int, chunks: int) -> float:
    """Seconds from where strike() would strike to the answer."""
    caught = Caught(fleet, number, chunks)
    began = time.monotonic()
    caught.asked.result(120)
    return time.monotonic() - began


def alone_s(fleet: Trio) -> float:
    """Seconds of an undisturbed prompt."""
    found = []
    for number in range(900, 903):
        prompt = prompt_of(fleet.model, number)
        text, seconds = fleet.ask(prompt, f"s{number}").result(120)
        assert text == fleet.model.greedy_text(prompt, TOKENS)
        found.append(seconds)
    return statistics.median(found)


@pytest.mark.full
def test_a_prompt_whose_server_is_killed_goes_on_at_another_one() -> None:
    with trio(STUB) as fleet:
        _, kept, _ = strike(fleet, 0, 8, killed)
        assert kept >= 7 * CHUNK


@pytest.mark.full
@pytest.mark.parametrize("model", [pytest.param(STUB, id="stub"), pytest.param(SMOLLM2, id="smollm2")])
def test_servers_killed_at_every_chunk_of_a_prompt(model: Model) -> None:
    with trio(model) as fleet:
        whole_s = alone_s(fleet)
        lost = []
        for chunks in range(CHUNKS - 1):  # behind the last but one there is a single pass, which a look may miss
            rest_s = undisturbed_s(fleet, 50 + chunks, chunks)
            victim, kept, seconds = strike(fleet, chunks, chunks, killed)
            lost.append(seconds - rest_s)
            print(f"killed at chunk {chunks}: {kept} tokens had come, {seconds - rest_s:.3f} s lost")
            fleet.again(victim)
        chunk_s = whole_s / CHUNKS
        print(f"{whole_s:.3f} s undisturbed, {chunk_s:.3f} s a chunk, {statistics.median(lost):.3f} s lost")
        assert statistics.median(lost) <= chunk_s + DETECTION_S


@pytest.mark.full
def test_a_prompt_whose_server_drains_goes_on_at_another_one() -> None:
    """It is told to end at once: what is not done by then moves."""

    def drained(server: Server) -> int:
        server.process.send_signal(signal.SIGTERM)
        return 8 * CHUNK  # or more

    with trio(STUB, "--drain-timeout", "0.2") as fleet:
        victim, kept, _ = strike(fleet, 0, 8, drained)
        assert kept >= 8 * CHUNK
        assert victim.process.wait(20) == 0


@pytest.mark.full
def test_a_prompt_whose_server_stops_goes_on_at_another_one() -> None:
    """By frames: nothing that has come can be written any more, though the server may go on at any time."""

    def stop(server: Server) -> int:
        halted(server)
        return 8 * CHUNK  # or more

    with trio(STUB, "--peer-timeout", "2", "--transfer-backends", "zmq") as fleet:
        _, kept, _ = strike(fleet, 0, 8, stop)
        assert kept >= 7 * CHUNK


def halted(server: Server) -> list[psutil.Process]:
    """SIGSTOP to all processes of a server."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    return processes


@pytest.mark.full
@pytest.mark.parametrize("backend", ["zmq", "shm"])
def test_a_second_server_is_started_on_a_prompt_whose_server_is_late_and_has_the_first_token(backend: str) -> None:
    """By frames it goes on from what has come; pages that the first server writes itself are left to it."""
    assert (overtaken(backend) > 0) == (backend == "zmq")


def overtaken(backend: str) -> int:
    """Have a prompt's server stop in the middle, and a second one started on it. Returns the tokens that this one did
    not send."""
    with trio(STUB, "--transfer-backends", backend, "--peer-timeout", "60", decode_flags=("--hedge", "2")) as fleet:
        whole_s = alone_s(fleet)
        wait_until(lambda: all(trusted(server) for server in fleet.prefills.values()), 20, "forecasts are made")
        prompt = prompt_of(STUB, 0)
        asked = fleet.ask(prompt, "s")
        victim, _ = fleet.computing(8 * CHUNK)
        processes = halted(victim)
        text, seconds = asked.result(60)
        assert text == STUB.greedy_text(prompt, TOKENS)
        assert seconds < 5 * whole_s
        metrics = fleet.decode.metrics()
        assert metrics['headrace_hedges_total{result="won"}'] == 1
        resumed = fleet.resumed()
        for process in processes:
            process.send_signal(signal.SIGCONT)
        for server in (fleet.decode, *fleet.prefills.values()):
            wait_until(lambda server=server: pages_in_use(server) == 0, 20, f"pages are back\n{server.log}")
        assert fleet.decode.total("headrace_integrity_errors") == 0
    return resumed


def trusted(server: Server) -> bool:
    load = server.get("/v1/handoff").json()["load"]
    return load is not None and bool(load["trusted"])


@pytest.mark.full
def test_two_servers_that_die_one_after_the_other_and_the_prompt_is_finished_at_home() -> None:
    with trio(STUB, decode_flags=("--fallback", "local")) as fleet:
        prompt = prompt_of(STUB, 0)
        asked = fleet.ask(prompt, "s")
        first, _ = fleet.computing(4 * CHUNK)
        killed(first)
        second, _ = fleet.computing(8 * CHUNK)
        assert second is not first
        computed = killed(second)
        text, _ = asked.result(120)
        assert text == STUB.greedy_text(prompt, TOKENS)
        assert fleet.resumed() >= computed - CHUNK


@pytest.mark.full
def test_without_a_way_back_the_rest_alone_is_sent() -> None:
    """The next server may not fetch from the decode server: it computes all, and sends what has not come."""
    with ExitStack() as stack:
        flags = (*STUB.flags, *FLAGS)
        prefills = [stack.enter_context(closing(Server("--role", "prefill", *flags))) for _ in range(2)]
        named = [flag for server in prefills for flag in ("--prefill", server.url)]
        decode = Server("--role", "decode", *named, *flags)
        stack.enter_context(closing(decode))
        for server in prefills:
            server.started()
        with running(decode):
            fleet = Trio.__new__(Trio)
            fleet.model, fleet.decode = STUB, decode
            fleet.prefills, fleet._pool = {server.url: server for server in prefills}, ThreadPoolExecutor(1)
            fleet.known()
            prompt = prompt_of(STUB, 0)
            asked = fleet.ask(prompt, "s")
            victim, _ = fleet.computing(8 * CHUNK)
            killed(victim)
            assert asked.result(120)[0] == STUB.greedy_text(prompt, TOKENS)
            kept, sound = fleet.resumed(), fleet.sound(victim)
            assert kept >= 7 * CHUNK
            assert sound.total("headrace_cached_tokens_total") == 0
            token_bytes = geometry_of(sound).token_bytes
            sent = (LENGTH - kept) * token_bytes
            wait_until(lambda: sound.total("headrace_bytes_sent_total") == sent, 10, f"{sent} bytes are sent")
        assert fleet.sound(victim).end() == 0
