"""Workers of Dynamo: what becomes of requests when a process of the fleet is killed, drained, or comes back."""

import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.server.launch.free_port import free_port
from tests.deployment.files import ROOT
from tests.deployment.readme import with_ports
from tests.e2e.harness import Server, pages_in_use, wait_until
from tests.routers.dynamo import PYTHON, Dynamo, Worker, dynamo, write_tokenizer
from tests.routers.fleet import Child, Router
from tests.routers.test_texts import streamed, texts

pytestmark = pytest.mark.routers

MODEL = "tested"
SLOW = "stub:layers=4,hidden=32,us_per_plan=20000"  # 20 ms a token
SLOW_PREFILL = "stub:layers=4,hidden=32,us_per_token=10000"  # 10 ms a token of a prompt
COMMON = ("--max-model-len", "2048", "--served-model-name", MODEL, "--hold-lease", "3")
PROMPT = "Tell a story that takes a while."
TOKENS = 120
LONG: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


class Fleet:
    """Prefill servers, decode servers, and Dynamo before them."""

    bootstrap_port = 0
    model = MODEL

    def __init__(self, prefills: Sequence[Server], decodes: Sequence[Server]) -> None:
        self.prefills, self.decodes = list(prefills), list(decodes)

    @property
    def prefill_urls(self) -> list[str]:
        return [server.url for server in self.prefills]

    @property
    def decode_urls(self) -> list[str]:
        return [server.url for server in self.decodes]

    @property
    def servers(self) -> list[Server]:
        return [*self.prefills, *self.decodes]

    def quiet(self) -> None:
        """No server that runs has anything open."""
        for server in self.servers:
            if server.process.poll() is None:
                wait_until(lambda s=server: pages_in_use(s) == 0, 20, f"pages are back\n{server.log}")
                assert server.metrics()["headrace_open_requests"] == 0


@contextmanager
def fleet(prefills: int, decodes: int, model: str = SLOW, *flags: str) -> Iterator[Fleet]:
    """flags: of the prefill servers."""
    shared = ("--model", model, *COMMON)
    with ExitStack() as stack:
        made = Fleet([], [])
        for _ in range(prefills):
            made.prefills.append(Server("--role", "prefill", *shared, *flags))
            stack.callback(end, made.prefills, len(made.prefills) - 1)
        own = [flag for url in made.prefill_urls for flag in ("--prefill", url)]
        for _ in range(decodes):
            made.decodes.append(Server("--role", "decode", *own, *shared))
            stack.callback(end, made.decodes, len(made.decodes) - 1)
        for server in made.servers:
            server.started()
        yield made


def end(servers: Sequence[Server], index: int) -> None:
    if servers[index].process.poll() is None:
        servers[index].kill()


def restarted(servers: list[Server], index: int, *flags: str) -> Server:
    """Start a server that was killed again, where it was."""
    servers[index] = Server(*flags, port=servers[index].port).started()
    return servers[index]


class Stream:
    """A streamed request, in a thread. texts(): its text when it has ended."""

    def __init__(self, router: Dynamo, body: dict[str, Any]) -> None:
        self.tokens = 0
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._run, router, {**body, "stream": True})

    def _run(self, router: Dynamo, body: dict[str, Any]) -> tuple[int, str]:
        lines: list[str] = []
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=120, trust_env=False) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                self.tokens += line.startswith("data: {")
            return answer.status_code, "\n".join(lines)

    def begun(self, tokens: int) -> "Stream":
        wait_until(lambda: self.tokens >= tokens or self._done.done(), 30, "it has begun")
        return self

    def text(self) -> str:
        status, content = self._done.result(120)
        self._pool.shutdown()
        return streamed(httpx.Response(status, text=content))[0]


def ask(router: Dynamo, **changes: Any) -> httpx.Response:
    return router.post("/v1/completions", {**LONG, "max_tokens": 4, **changes})


def served_again(router: Dynamo, own: str) -> None:
    """own: what the first tokens are."""

    def served() -> bool:
        try:
            answer = ask(router)
        except httpx.TransportError:  # it starts
            return False
        return answer.status_code == 200 and own.startswith(texts(answer)[0])

    wait_until(served, 90, f"it serves again\n{router.log}")


@pytest.fixture(scope="module")
def two() -> Iterator[Fleet]:
    """Two servers of each role."""
    with fleet(2, 2) as made:
        yield made


@pytest.fixture(scope="module")
def own(two: Fleet) -> str:
    """What the decode server says by itself."""
    return texts(two.decodes[0].post("/v1/completions", LONG))[0]


@pytest.fixture(scope="module")
def migrating(two: Fleet) -> Iterator[Dynamo]:
    with dynamo(two, "--migration-limit", "3") as made:
        yield made


def serving_server(fleet: Fleet) -> int:
    """The number of the decode server that has a request open."""
    found: list[int] = []

    def busy() -> bool:
        found[:] = [n for n, server in enumerate(fleet.decodes) if server.metrics()["headrace_open_requests"]]
        return bool(found)

    wait_until(busy, 10, "one has it")
    return found[0]


def test_a_client_that_goes_ends_its_request_at_the_server(two: Fleet, migrating: Dynamo) -> None:
    body = {**LONG, "max_tokens": 1900, "stream": True}
    with httpx.stream("POST", f"{migrating.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        lines = answer.iter_lines()  # which ends the request when it is dropped
        assert next(lines).startswith("data: ")
        assert serving_server(two) in (0, 1)
    wait_until(lambda: not any(s.metrics()["headrace_open_requests"] for s in two.servers), 5, "nothing is open")
    two.quiet()


def test_a_request_moves_on_when_its_decode_server_dies(two: Fleet, migrating: Dynamo, own: str) -> None:
    """The tokens that the client has come back as a prompt: the text is what it would have been."""
    stream = Stream(migrating, LONG).begun(20)
    struck = serving_server(two)
    flags = command_of(two, "decode")
    two.decodes[struck].kill()
    assert stream.text() == own
    registered = {"prefill": 2, "backend": 1}
    wait_until(lambda: migrating.registered() == registered, 10, f"it is not registered\n{migrating.log}")
    assert texts(ask(migrating, max_tokens=TOKENS))[0] == own
    restarted(two.decodes, struck, *flags)
    everyone = {"prefill": 2, "backend": 2}
    wait_until(lambda: migrating.registered() == everyone, 20, f"it is registered again\n{migrating.log}")
    two.quiet()


def test_a_request_moves_on_when_its_worker_dies(two: Fleet, migrating: Dynamo, own: str) -> None:
    stream = Stream(migrating, LONG).begun(20)
    struck = serving_server(two)
    url = two.decode_urls[struck]
    worker = migrating.decodes[struck]
    worker.process.kill()
    assert stream.text() == own
    wait_until(lambda: not two.decodes[struck].metrics()["headrace_open_requests"], 5, "the server has ended it")
    worker.close()
    migrating.decodes[struck] = Worker(migrating, "decode", url)
    served_again(migrating, own)
    two.quiet()


def test_prompts_go_elsewhere_when_a_prefill_server_dies(two: Fleet, migrating: Dynamo, own: str) -> None:
    flags = command_of(two, "prefill")
    two.prefills[0].kill()
    for _ in range(4):  # some of them before anybody knows
        assert texts(ask(migrating, max_tokens=TOKENS))[0] == own
    left = {"prefill": 1, "backend": 2}
    wait_until(lambda: migrating.registered() == left, 10, f"it is not registered\n{migrating.log}")
    restarted(two.prefills, 0, *flags)
    everyone = {"prefill": 2, "backend": 2}
    wait_until(lambda: migrating.registered() == everyone, 20, f"it is registered again\n{migrating.log}")
    wait_until(lambda: all(server.ready() for server in two.decodes), 20, "the decode servers have found it")
    two.quiet()


@pytest.mark.parametrize("limit", [3, 0])
def test_prompts_under_way_when_their_prefill_worker_is_killed(limit: int) -> None:
    """They are computed by the other one, or answered with an error without --migration-limit; no KV is left."""
    with fleet(2, 1, SLOW_PREFILL) as site, dynamo(site, "--migration-limit", str(limit)) as router:
        prompts = [f"{number} times a story. " * 8 for number in range(6)]
        struck, worker = site.prefills[0], router.prefills[0]
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(ask, router, prompt=each) for each in prompts]
            wait_until(lambda: struck.metrics()["headrace_open_requests"] >= 2, 20, "it has some of them")
            worker.process.kill()
            answers = [each.result(60) for each in asked]
        own = [texts(site.decodes[0].post("/v1/completions", {**LONG, "prompt": each, "max_tokens": 4}))[0]
               for each in prompts]  # fmt: skip
        served = [(answer, text) for answer, text in zip(answers, own, strict=True) if answer.status_code == 200]
        assert [texts(answer)[0] for answer, _ in served] == [text for _, text in served]
        failed = [answer for answer in answers if answer.status_code != 200]
        assert bool(failed) == (not limit)
        assert all(answer.status_code == 503 and answer.json()["message"] for answer in failed)
        site.quiet()
        without = {"prefill": 1, "backend": 1}
        wait_until(lambda: router.registered() == without, 30, f"it is not registered\n{router.log}")
        worker.close()
        router.prefills[0] = Worker(router, "prefill", struck.url)
        everyone = {"prefill": 2, "backend": 1}
        wait_until(lambda: router.registered() == everyone, 30, f"it is registered again\n{router.log}")
        before = struck.total("headrace_prompt_tokens_total")
        wait_until(
            lambda: texts(ask(router))[0] and struck.total("headrace_prompt_tokens_total") > before, 20, "it serves"
        )
        assert [texts(ask(router, prompt=each))[0] for each in prompts] == own
        site.quiet()


def test_a_worker_that_is_told_to_end_ends_its_requests_first(two: Fleet, migrating: Dynamo, own: str) -> None:
    stream = Stream(migrating, LONG).begun(10)
    drained = serving_server(two)
    worker = migrating.decodes[drained]
    worker.process.send_signal(signal.SIGTERM)
    left = {"prefill": 2, "backend": 1}
    wait_until(lambda: migrating.registered() == left, 5, f"it is not registered\n{migrating.log}")
    assert texts(ask(migrating))[0] == own[: len(texts(ask(migrating))[0])], "others are served meanwhile"
    assert stream.text() == own
    assert worker.process.wait(30) == 0
    assert "EngineShutdown" not in worker.log
    worker.close()
    migrating.decodes[drained] = Worker(migrating, "decode", two.decode_urls[drained])
    everyone = {"prefill": 2, "backend": 2}
    wait_until(lambda: migrating.registered() == everyone, 30, f"it is registered again\n{migrating.log}")
    two.quiet()


def test_a_server_that_drains_gets_no_more_requests(two: Fleet, migrating: Dynamo, own: str) -> None:
    stream = Stream(migrating, LONG).begun(10)
    drained = serving_server(two)
    flags = command_of(two, "decode")
    server = two.decodes[drained]
    server.process.send_signal(signal.SIGTERM)
    for _ in range(4):
        assert own.startswith(texts(ask(migrating))[0])
    assert stream.text() == own, "it ends at the server where it began"
    assert server.ended() == 0
    server.close()
    restarted(two.decodes, drained, *flags)
    everyone = {"prefill": 2, "backend": 2}
    wait_until(lambda: migrating.registered() == everyone, 20, f"it is registered again\n{migrating.log}")
    two.quiet()


def test_a_frontend_that_starts_later_knows_the_workers(two: Fleet, own: str) -> None:
    with dynamo(two) as first:
        first.process.kill()
        first.process.wait()
        with closing(first.another()):
            served_again(first, own)
    two.quiet()


def command_of(fleet: Fleet, role: str) -> tuple[str, ...]:
    """Flags of the servers of a role."""
    own = [flag for url in fleet.prefill_urls for flag in ("--prefill", url)] if role == "decode" else []
    return ("--role", role, *own, "--model", SLOW, *COMMON)


def test_without_any_prefill_worker(own: str) -> None:
    """Nothing is served, and nothing hangs, until there is one again."""
    with fleet(1, 1) as one, dynamo(one) as router:
        flags = command_of(one, "prefill")
        one.prefills[0].kill()
        started = time.monotonic()
        assert ask(router).status_code >= 500
        assert time.monotonic() - started < 20
        restarted(one.prefills, 0, *flags)
        wait_until(one.decodes[0].ready, 20, "the decode server has found it")
        served_again(router, own)
        one.quiet()


def test_a_server_that_comes_back_as_another_one_ends_its_worker() -> None:
    with fleet(1, 1) as one, dynamo(one) as router:
        one.decodes[0].kill()
        flags = (*command_of(one, "decode"), "--page-size", "32")
        restarted(one.decodes, 0, *flags)
        worker = router.decodes[0]
        assert worker.process.wait(30) == 0
        assert "has come back as another server" in worker.log


def test_the_router_sends_prompts_where_their_beginning_is_cached() -> None:
    with ExitStack() as stack:
        ports = [free_port(), free_port()]
        shared = ("--model", SLOW, *COMMON)
        prefills = [stack.enter_context(closing(Server("--role", "prefill", *shared, "--kv-events-port", str(port))))
                    for port in ports]  # fmt: skip
        own = [flag for server in prefills for flag in ("--prefill", server.url)]
        decode = stack.enter_context(closing(Server("--role", "decode", *own, *shared)))
        site = Fleet(prefills, [decode])
        for server in site.servers:
            server.started()
        with dynamo(site, "--router-mode", "kv") as router:
            stories = [f"Story number {n}. " * 40 for n in range(4)]
            for story in stories:
                assert ask(router, prompt=story).status_code == 200
            time.sleep(1)  # the router hears of it
            before = [server.metrics()["headrace_open_requests"] for server in prefills]
            assert before == [0, 0]
            for turn in range(3):
                for story in stories:
                    used = ask(router, prompt=story + f"And then {turn}").json()["usage"]
                    cached = used["prompt_tokens_details"]["cached_tokens"]
                    assert cached >= len(story) // 16 * 16, f"turn {turn}: {cached} of {len(story)}"
            assert all(server.total("headrace_prompt_tokens_total") for server in prefills), "both have some of them"
        site.quiet()


def test_a_worker_that_starts_later_tells_what_was_cached_before() -> None:
    """Prompts are computed behind one Dynamo; the KV router of the next one knows where from the replays."""
    with ExitStack() as stack:
        shared = ("--model", SLOW, *COMMON)
        events = [("--kv-events-port", str(free_port()), "--kv-events-replay-port", str(free_port())) for _ in range(2)]
        prefills = [stack.enter_context(closing(Server("--role", "prefill", *shared, *flags))) for flags in events]
        own = [flag for server in prefills for flag in ("--prefill", server.url)]
        decode = stack.enter_context(closing(Server("--role", "decode", *own, *shared)))
        site = Fleet(prefills, [decode])
        for server in site.servers:
            server.started()
        stories = [f"Story number {n}. " * 40 for n in range(8)]
        with dynamo(site) as before:
            for story in stories:
                assert ask(before, prompt=story).status_code == 200
        with dynamo(site, "--router-mode", "kv") as router:
            time.sleep(1)  # the router hears of it

            def cached(story: str, more: str) -> int:
                usage = ask(router, prompt=story + more).json()["usage"]
                return int(usage["prompt_tokens_details"]["cached_tokens"])

            assert [cached(story, "Go on.") >= len(story) // 16 * 16 for story in stories] == [True] * 8
            prefills[0].kill()  # and its cache is gone
            site.prefills[0] = prefills[0] = stack.enter_context(
                closing(Server("--role", "prefill", *shared, *events[0], port=prefills[0].port))
            ).started()
            everyone = {"prefill": 2, "backend": 1}
            wait_until(lambda: router.registered() == everyone, 30, f"it is registered again\n{router.log}")
            first = [cached(story, "And then?") for story in stories]
            again = [cached(story, "And then?") >= len(story) // 16 * 16 for story in stories]
            assert again == [True] * 8, first
        site.quiet()


def test_the_load_is_told_to_dynamo() -> None:
    """Its gauges of the worker follow the pages that the server holds."""
    with fleet(1, 1, SLOW, "--hold-lease", "8") as one, dynamo(one) as router:
        port = free_port()
        router.prefills[0].close()
        router.prefills[0] = Worker(router, "prefill", one.prefills[0].url, DYN_SYSTEM_PORT=str(port))

        def gauge(name: str) -> float | None:
            try:
                text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text
            except httpx.TransportError:
                return None
            lines = [line for line in text.splitlines() if line.startswith(f"dynamo_component_{name}{{")]
            return float(lines[0].rpartition(" ")[2]) if lines else None

        kinds = [f'headrace_kv_pages{{state="{state}"}}' for state in ("free", "cached", "leased")]
        pages = sum(one.prefills[0].metrics()[kind] for kind in kinds)
        wait_until(lambda: gauge("total_blocks") == pages, 30, f"it is told\n{router.log}")
        assert gauge("gpu_cache_usage_percent") == 0
        held = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {"text": PROMPT * 4, "sampling_params": {"max_new_tokens": 1}, "kv_transfer_params": held}
        assert one.prefills[0].post("/generate", body).status_code == 200
        wait_until(lambda: (gauge("gpu_cache_usage_percent") or 0) > 0, 5, "its pages count")
        one.quiet()
        wait_until(lambda: gauge("gpu_cache_usage_percent") == 0, 5, "they are free")


def test_priorities_are_those_of_dynamo() -> None:
    """A higher one goes first. One prompt is computed, and the next one is chosen, while the others come."""
    with fleet(1, 1, SLOW_PREFILL, "--chunk-tokens", "64") as one, dynamo(one) as router:
        ended: list[int] = []

        def prompt(priority: int) -> None:
            hints = {"agent_hints": {"priority": priority}}
            answer = ask(router, prompt=f"{priority} words " * 20, max_tokens=1, nvext=hints)
            assert answer.status_code == 200, answer.text
            ended.append(priority)

        threads = [threading.Thread(target=prompt, args=(priority,)) for priority in (9, 8, 1, 5, 3, 7)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        assert ended == [9, 8, 7, 5, 3, 1]
        one.quiet()


def test_the_commands_of_the_page(own: str) -> None:
    """Of docs/dynamo.md, on other ports, and with a tokenizer that is here."""
    page = (ROOT / "docs" / "dynamo.md").read_text()
    blocks = [block.strip().splitlines() for block in page.split("```")[1::2]]
    workers = next(lines for lines in blocks if any(line.startswith("headrace dynamo prefill") for line in lines))
    variables, frontend = next(lines for lines in blocks if any("dynamo.frontend --" in line for line in lines))
    with fleet(1, 1) as one, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        ports = {"8000": one.prefills[0].port, "8001": one.decodes[0].port, "8080": port}
        store = {"/tmp/dynamo": str(folder / "store")}
        hub = {"HuggingFaceTB/SmolLM2-135M-Instruct": str(write_tokenizer(SLOW, folder / "tokenizer"))}
        (folder / "store").mkdir()

        def run(line: str) -> list[str]:
            for old, new in (store | hub).items():
                line = line.replace(old, new)
            return with_ports(line, ports)

        settings = dict(each.split("=") for each in run(variables) if "=" in each)
        router = stack.enter_context(closing(Router("dynamo", PYTHON, *run(frontend)[1:], port=port, **settings)))
        for line in workers:
            if line:
                command = (PYTHON, "-m", "headrace.cli.commands", *run(line)[1:])
                path = {"PYTHONPATH": str(ROOT / "src")}
                stack.enter_context(closing(Child(line, *command, **settings, **path)))
        body = {**LONG, "max_tokens": 5}
        router.wait_ready(body)
        assert own.startswith(texts(router.post("/v1/completions", body))[0])
