"""Two servers on one machine, with KV written straight into the decode server's pool, when one dies, stops or cancels.

The stub model's texts show every wrong page (engine/stub/runner.py); they are compared with those of one runner
alone, or with those before something went wrong.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import Server, pages_in_use, pair, running, serving, stopped, wait_until
from tests.e2e.models import SIZES, StubOracle

MODEL = f"{SIZES},us_per_token=400"
TOKENS = 8
FLAGS = ("--model", MODEL, "--chunk-tokens", "128", "--kv-pages", "1024", "--threads", "1", "--peer-timeout", "1")
TEXT = "a long prompt of which a part is on its way when something goes wrong " * 60


def ask(server: Server, prompt: str = TEXT, timeout_s: float = 60.0) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=timeout_s)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def written(server: Server, backend: str = "shm") -> float:
    """Bytes that this prefill server has sent by a backend."""
    return server.metrics().get(f'headrace_bytes_sent_total{{backend="{backend}"}}', 0.0)


def begun(prefill: Server, decode: Server, pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """A request of which some chunks are written and some are not even computed."""
    before = written(prefill)
    answer = pool.submit(ask, decode)
    wait_until(lambda: written(prefill) > before, 20, f"KV is on its way\n{prefill.log}")
    assert not answer.done()
    return answer


def pool_of(decode: Server) -> Path:
    """The file that the decode server's stage has mapped; other servers of the machine have theirs. By its number: the
    kernel goes on calling it by the one name it had before it was linked."""
    lines = Path(f"/proc/{decode.child('headrace.engine.stage').pid}/maps").read_text().splitlines()
    mapped = {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return next(path for path in Path("/dev/shm").glob("headrace-kv-*") if path.stat().st_ino in mapped)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "other"), [("shm", "zmq"), pytest.param("zmq", "shm", marks=pytest.mark.full)])
def test_texts_are_those_of_one_runner_alone_by_either_way(backend: str, other: str) -> None:
    prompts = [TEXT[:length] for length in (1, 15, 16, 17, 300, 1700)]
    oracle = StubOracle(SIZES, 2000)
    with pair(FLAGS, (*FLAGS, "--page-size", "64", "--transfer-backends", backend)) as (prefill, decode):
        pool = pool_of(decode) if backend == "shm" else None
        expected = [oracle.greedy_text(list(prompt.encode()), TOKENS) for prompt in prompts]
        assert [text_of(ask(decode, prompt)) for prompt in prompts] == expected
        wait_until(lambda: written(prefill, backend) > 0, 10, "stages tell what they have sent with heartbeats")
        assert written(prefill, other) == 0
        assert f"by {backend}: " in prefill.log
    assert pool is None or not pool.exists(), "an orderly end leaves nothing behind"


@pytest.mark.full
def test_a_cancelled_request_returns_its_pages_and_the_next_one_is_right() -> None:
    with pair(FLAGS, FLAGS) as (prefill, decode), ThreadPoolExecutor(4) as pool:
        expected = text_of(ask(decode))
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                ask(decode, f"{written(prefill)} {TEXT}", timeout_s=0.5)
            others = [pool.submit(ask, decode, TEXT[:length]) for length in (200, 900)]
            assert all(text_of(other.result()) for other in others)
        for server in (prefill, decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 10, f"pages back\n{server.log}")
        assert text_of(ask(decode)) == expected


@pytest.mark.full
def test_pages_that_a_stopped_prefill_server_may_write_stay_in_quarantine_until_it_is_gone() -> None:
    with (
        closing(Server("--role", "prefill", *FLAGS)) as prefill,
        serving("--role", "decode", "--prefill", prefill.url, "--fallback", "local", *FLAGS) as decode,
        ThreadPoolExecutor(1) as pool,
    ):
        prefill.started()
        try:
            wait_until(lambda: decode.metrics()["headrace_prefill_servers"] == 1, 20, "the prefill server is found")
            answer = begun(prefill, decode, pool)
            with stopped(prefill):
                answer.result()  # an error, or computed here after all
                quarantined = decode.metrics()["headrace_quarantined_pages"]
                assert quarantined == pages_in_use(decode) > 0
                assert text_of(ask(decode, TEXT[:500])), "it goes on with its other pages"
                assert decode.metrics()["headrace_quarantined_pages"] == quarantined, "silence is no proof"
                prefill.kill()
        finally:
            if prefill.process.poll() is None:
                prefill.kill()
        wait_until(lambda: decode.metrics()["headrace_quarantined_pages"] == 0, 5, f"death is\n{decode.log}")
        wait_until(lambda: pages_in_use(decode) == 0, 5, "pages back")


@pytest.mark.full
def test_a_prefill_server_that_was_stopped_and_goes_on_lets_go() -> None:
    with pair(FLAGS, FLAGS) as (prefill, decode), ThreadPoolExecutor(1) as pool:
        expected = text_of(ask(decode, TEXT[:900]))
        answer = begun(prefill, decode, pool)
        with stopped(prefill):
            assert answer.result().status_code in (502, 503, 504)
            assert decode.metrics()["headrace_quarantined_pages"] > 0
        wait_until(lambda: decode.metrics()["headrace_quarantined_pages"] == 0, 20, f"it lets go\n{prefill.log}")
        wait_until(lambda: ask(decode, TEXT[:900]).status_code == 200, 20, f"they meet again\n{decode.log}")
        assert text_of(ask(decode, TEXT[:900])) == expected


@pytest.mark.full
def test_the_memory_of_a_killed_decode_server_is_gone_when_the_next_one_has_started() -> None:
    """Usually earlier: the stage that wrote into it removes it, unless its owner has not quite ended by then."""
    with running(Server("--role", "prefill", *FLAGS)) as prefill, ThreadPoolExecutor(1) as pool:
        with closing(Server("--role", "decode", "--prefill", prefill.url, *FLAGS)) as decode:
            try:
                decode.started()
                answer = begun(prefill, decode, pool)
                memory = pool_of(decode)
            finally:
                decode.kill()
        assert answer.exception() is not None
        wait_until(lambda: pages_in_use(prefill) == 0, 10, f"pages back\n{prefill.log}")
        with serving("--role", "decode", "--prefill", prefill.url, *FLAGS) as successor:
            assert not memory.exists()
            assert pool_of(successor) != memory


@pytest.mark.full
def test_a_decode_stage_that_starts_again_has_another_pool_and_says_so() -> None:
    with pair(FLAGS, FLAGS) as (prefill, decode), ThreadPoolExecutor(1) as pool:
        expected = text_of(ask(decode, TEXT[:900]))
        first = pool_of(decode)
        answer = begun(prefill, decode, pool)
        decode.child("headrace.engine.stage").kill()
        assert answer.result().status_code == 503
        wait_until(lambda: decode.get("/ready").status_code == 200, 60, f"it is back\n{decode.log}")
        assert pool_of(decode) != first
        assert not first.exists(), "the dead stage's memory is gone"
        before = written(prefill)
        wait_until(lambda: ask(decode, TEXT[:900]).status_code == 200, 20, "the two meet again")
        assert text_of(ask(decode, TEXT[:900])) == expected
        wait_until(lambda: written(prefill) > before, 10, "stages tell what they have sent with their heartbeats")


@pytest.mark.full
def test_a_prefill_stage_that_dies_ends_the_session_before_its_pages_are_used_again() -> None:
    with pair(FLAGS, FLAGS) as (prefill, decode), ThreadPoolExecutor(1) as pool:
        expected = text_of(ask(decode, TEXT[:900]))
        answer = begun(prefill, decode, pool)
        prefill.child("headrace.engine.stage").kill()
        assert answer.result().status_code in (502, 503, 504)
        wait_until(lambda: pages_in_use(decode) == 0, 10, f"pages back\n{decode.log}")
        wait_until(lambda: prefill.get("/ready").status_code == 200, 60, f"it is back\n{prefill.log}")
        wait_until(lambda: ask(decode, TEXT[:900]).status_code == 200, 20, "the two meet again")
        assert text_of(ask(decode, TEXT[:900])) == expected
