"""Audits between real servers: one that computes wrongly is found, one that does not is never accused."""

import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest

from tests.e2e.dishonest import Wrong, write_hook
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.models import SHARDED_SIZES, SIZES
from tests.models.zoo import save_for_servers, save_plainly

STUB = ("--model", SIZES, "--kv-pages", "256", "--max-model-len", "2048", "--chunk-tokens", "64")
RESULTS = ("equal", "different", "no_page", "no_server", "other_computation", "busy", "late", "failed")
PROMPT = 100  # tokens


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two random models of the same shape."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("right", "other")}
    save_for_servers("llama", folders["right"])
    save_for_servers("llama", folders["other"], _save_changed)
    return folders


def _save_changed(folder: Path, model: Any) -> None:
    """With one weight of many that is another one."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight[0, 0] += 0.5
    save_plainly(folder, model)


def begun(stack: ExitStack, *flags: str, hook: str = "") -> Server:
    """A server that starts. hook: what PYTHONPATH is to be; "": as it is."""
    with pytest.MonkeyPatch.context() as environment:
        if hook:
            environment.setenv("PYTHONPATH", hook)
        return stack.enter_context(closing(Server(*flags)))


def fleet(
    stack: ExitStack,
    rate: float,
    model: Sequence[str],
    *prefills: tuple[Sequence[str], str],
    decode: Sequence[str] = (),
) -> tuple[Server, list[Server]]:
    """A decode server that audits, and its prefill servers: flags and hook of each."""
    begin = [begun(stack, "--role", "prefill", *model, *flags, hook=hook) for flags, hook in prefills]
    urls = [flag for one in begin for flag in ("--prefill", one.url)]
    flags = ("--role", "decode", "--audit-rate", str(rate), "--routing", "least-load", *urls, *model, *decode)
    auditing = begun(stack, *flags)
    for one in (*begin, auditing):
        stack.enter_context(running(one))
    wait_until(lambda: auditing.metrics()["headrace_prefill_servers"] == len(begin), 20, "all servers are reached")
    return auditing, begin


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(256) for _ in range(length)]


def ask(server: Server, tokens: list[int], answer: int = 2, at: Server | None = None) -> str:
    """at: the prefill server that is to compute it."""
    body = {"prompt": tokens, "max_tokens": answer, "temperature": 0}
    headers = {} if at is None else {"x-prefiller-host-port": at.url.removeprefix("http://")}
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def audits(server: Server) -> dict[str, float]:
    """Audits by their results, those that there were."""
    metrics = server.metrics()
    found = {result: metrics[f'headrace_audits_total{{result="{result}"}}'] for result in RESULTS}
    return {result: count for result, count in found.items() if count}


def audited(server: Server, count: int) -> dict[str, float]:
    """The same, once so many have ended."""
    wait_until(lambda: sum(audits(server).values()) == count, 60, f"{count} audits have ended: {audits(server)}")
    return audits(server)


def one_by_one(server: Server, seeds: range) -> dict[str, float]:
    """Audits of these prompts, one after the other."""
    for number, seed in enumerate(seeds, 1):
        ask(server, prompt(seed))
        audited(server, number)
    return audits(server)


@pytest.mark.full
def test_a_flipped_bit_names_both_servers_and_an_honest_fleet_has_none(servers: ExitStack, tmp_path: Path) -> None:
    decode, prefills = fleet(servers, 1.0, STUB, ((), ""), ((), write_hook(tmp_path, "flips a bit")))
    found: dict[str, float] = {}
    for number in range(1, 60):  # a chunk has several pages, and one bit of it is wrong
        ask(decode, prompt(number))
        found = audited(decode, number)
        if "different" in found:
            break
    assert found["different"] == 1, found
    assert set(found) <= {"equal", "different"}
    lines = re.findall(r"audit: the KV of request .*", decode.log)
    assert len(lines) == found["different"]
    for line in lines:
        assert all(prefill.url in line for prefill in prefills)
        assert "in 1 layers" in line
    for one in (decode, *prefills):
        wait_until(lambda one=one: pages_in_use(one) == 0, 10, "pages are back")
        assert "Traceback" not in one.log


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", ["flips a bit", "rounds", "truncates", "other weights"])
def test_every_kind_of_wrong_server_is_found(
    wrong: Wrong, dtype: str, servers: ExitStack, models: dict[str, Path], tmp_path: Path
) -> None:
    model = ("--served-model-name", "m", "--dtype", dtype, "--kv-pages", "128", "--chunk-tokens", "64")
    true = ("--model", str(models["right"]))
    probe = begun(servers, "--role", "prefill", *model, *true)
    with running(probe):
        fingerprint = probe.get("/v1/handoff").json()["fingerprint"]
    hook = write_hook(tmp_path, wrong, fingerprint=fingerprint)
    other = ("--model", str(models["other"])) if wrong == "other weights" else true
    decode, _ = fleet(servers, 1.0, model, (true, ""), (other, hook), decode=true)
    found = one_by_one(decode, range(8 if wrong != "flips a bit" else 24))
    nan = {"failed"} if wrong == "flips a bit" else set()  # of what comes behind some flipped bits
    assert set(found) - nan <= {"equal", "different"}, found
    assert found["different"]
    assert wrong == "flips a bit" or found["different"] == 8


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_servers_of_any_shape_are_never_accused(dtype: str, servers: ExitStack, models: dict[str, Path]) -> None:
    """Other chunks, other pages, two stages, many prompts at once, prefixes that are cached; a decode server of two
    shards."""
    model = ("--model", str(models["right"]), "--served-model-name", "m", "--dtype", dtype, "--kv-pages", "256")
    shapes = (
        (("--chunk-tokens", "32", "--page-size", "32"), ""),
        (("--chunk-tokens", "256", "--pp", "2"), ""),
    )
    decode, prefills = fleet(servers, 1.0, model, *shapes, decode=("--tp", "2"))
    shared = prompt(0, 64)
    count = 24
    for seed in range(count):
        ask(decode, [*shared, *prompt(seed + 1, 20 + 7 * seed)], 2 + seed % 5, at=prefills[seed % 2])
        audited(decode, seed + 1)
    found = audits(decode)
    assert set(found) == {"equal"}, found


@pytest.mark.full
def test_shards_are_compared_with_as_many_shards_alone(servers: ExitStack) -> None:
    model = ("--model", SHARDED_SIZES, "--kv-pages", "256", "--max-model-len", "2048")
    two = (("--tp", "2"), "")
    decode, prefills = fleet(servers, 1.0, model, two, two, ((), ""))
    for number, prefill in enumerate(prefills, 1):
        ask(decode, prompt(number), at=prefill)
        audited(decode, number)
    assert audits(decode) == {"equal": 2.0, "other_computation": 1.0}
    keys = [one.get("/v1/handoff").json()["computation"] for one in prefills]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.full
def test_a_server_that_is_wrong_now_and_then_is_found_in_as_many_prompts_as_theory_says(
    servers: ExitStack, tmp_path: Path
) -> None:
    """Both servers send, and compute again; one of them damages the pages of half of its chunks."""
    rate, share, rounds = 0.5, 0.5, 20
    hook = write_hook(tmp_path, "truncates", share, seed=3)
    decode, prefills = fleet(servers, rate, STUB, ((), ""), ((), hook))
    waits, since, seen = list[int](), 0, 0.0
    for seed in range(400):
        ask(decode, prompt(seed), at=prefills[seed % 2])
        since += 1
        time.sleep(0.1)  # so that no audit is under way when the next prompt is drawn
        different = audits(decode).get("different", 0.0)
        if different > seen:
            waits.append(since)
            since, seen = 0, different
        if len(waits) == rounds:
            break
    print(f"found after {waits} prompts, on average {mean(waits):.1f}; theory {1 / (rate * share):.1f}")
    assert mean(waits) == pytest.approx(1 / (rate * share), rel=0.6)


@pytest.mark.full
@pytest.mark.parametrize(("strike", "result"), [("kill", "failed"), ("drain", "busy")])
def test_an_auditor_that_is_killed_or_drains_while_it_computes_harms_nothing(
    strike: str, result: str, servers: ExitStack
) -> None:
    slow = ("--model", f"{SIZES},us_per_token=5000", *STUB[2:])
    prefills = [begun(servers, "--role", "prefill", *slow) for _ in range(2)]
    urls = [flag for one in prefills for flag in ("--prefill", one.url)]
    decode = begun(servers, "--role", "decode", "--audit-rate", "1", *urls, *slow)
    sender, auditor = [one.started() for one in prefills]
    servers.enter_context(running(decode))
    wait_until(lambda: decode.metrics()["headrace_prefill_servers"] == 2, 20, "both servers are reached")
    for seed in range(10):
        before = sum(audits(decode).values())
        ask(decode, prompt(seed, 300), at=sender)
        wait_until(
            lambda before=before: pages_in_use(auditor) or sum(audits(decode).values()) > before, 10, "an audit begins"
        )
        if pages_in_use(auditor):
            break
    auditor.kill() if strike == "kill" else auditor.process.terminate()
    wait_until(lambda: audits(decode).get(result, 0) == 1, 20, f"it is skipped: {audits(decode)}")
    wait_until(lambda: decode.metrics()["headrace_prefill_servers"] == 1, 20, "it is gone")
    ask(decode, prompt(77), at=sender)
    wait_until(lambda: audits(decode).get("no_server", 0) == 1, 10, "nobody else is there")
    assert "different" not in audits(decode)
    for one in (decode, sender):
        wait_until(lambda one=one: pages_in_use(one) == 0, 10, "pages are back")
        assert "Traceback" not in one.log
    assert sender.end() == 0
