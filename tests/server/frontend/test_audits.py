"""Audits of prefill servers by a decode server, and the pages that a prefill server computes again for them."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from random import Random
from statistics import mean
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import AddPrefill, KvHint, Submit
from headrace.core.messages.replies import AnySchedulerReply, KvDigested, ServerInfo, StagePools
from headrace.core.types.kv.kv_files import KvComputation
from headrace.core.types.packed import unpack
from headrace.core.types.requests.kv_hints import Release
from headrace.core.types.requests.outcomes import DISCARDED
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.server.frontend.generation import audits
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.service import Service
from headrace.server.upstream.prefill_server import PrefillServer
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import Prefills, until_ready, welcoming
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, reserving, running, saying, server_info

URLS = ("http://p1:8001", "http://p2:8001", "http://p3:8001")
PAGE = 16
TRUE, WRONG = {"kv": ("aa", "bb")}, {"kv": ("aa", "cc")}
PROMPT = list(range(3 * PAGE))
COMPUTATION = KvComputation("cpu", "float32", "none", "2", "1")


class Auditors(Prefills):
    """Prefill servers that say what they compute with, and answer audits. answer: of a server, by its host."""

    def __init__(self, answer: Callable[[str, dict[str, Any]], httpx.Response], *computations: str | None) -> None:
        super().__init__()
        hosts = [url.split("/")[2].split(":")[0] for url in URLS[: len(computations)]]
        self.control_ports = {host: 5001 + number for number, host in enumerate(hosts)}
        self.computations = dict(zip(hosts, computations, strict=True))
        self.audit = answer
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.audited: list[tuple[str, dict[str, Any]]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.more = {"computation": self.computations[host]} if self.computations[host] is not None else {}
        self.instance = f"{self.control_ports[host]:032x}"
        if request.url.path != "/v1/audits":
            return await super().handle_async_request(request)
        body = msgspec.json.decode(await request.aread())
        self.audited.append((host, body))
        await self.goes_on.wait()
        return self.audit(host, body)


def answering(digest: dict[str, Any], computation: str = "same") -> Callable[[str, dict[str, Any]], httpx.Response]:
    return lambda _host, _body: httpx.Response(200, json={"computation": computation, "digest": digest})


def digesting(tokenizer: Tokenizer, digest: dict[str, Any], page: int = 1) -> Callable[..., list[AnySchedulerReply]]:
    """A decode scheduler: KV comes, and of prompts that are audited the digest of a page."""

    def script(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        digested = KvDigested(rid=submit.rid, start=page * PAGE, end=page * PAGE + PAGE, digest=digest)
        tokens = saying(tokenizer, "hello")(link, submit)
        return [*reserving(link, submit), *([digested] if submit.audit is not None else []), *tokens]

    return script


async def audit(
    tokenizer: Tokenizer, prefills: Auditors, script: Any = None, *, rate: float = 1.0, prompts: int = 1
) -> dict[str, float]:
    """What becomes of audits of so many prompts."""
    link, urls = FakeLink(), URLS[: len(prefills.control_ports)]
    link.script = script or digesting(tokenizer, TRUE)
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(
            running(link, tokenizer, role="decode", prefill=urls, prefill_transport=prefills, audit_rate=rate)
        )
        http = await stack.enter_async_context(client(service))
        await link.wait_for(AddPrefill, len(urls))
        welcoming(link, *urls)
        await until_ready(http)
        for _ in range(prompts):
            body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            await asyncio.sleep(0.01)
        if prompts > 1:
            prefills.goes_on.set()
        async with asyncio.timeout(5):
            while service.audits is not None and (len(service.audits._audits) or not counted(service)):
                await asyncio.sleep(0.005)
        return counted(service)


def counted(service: Service) -> dict[str, float]:
    samples = service.metrics.statistics().samples
    return {sample.labels[0]: sample.value for sample in samples if sample.name == "audits_total"}


@in_loop
async def test_another_server_computes_the_page_and_equal_digests_say_nothing(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    prefills = Auditors(answering(TRUE), "same", "same")
    assert await audit(tokenizer, prefills) == {"equal": 1.0}
    (host, body), (sender, *_) = prefills.audited[0], prefills.posts[0]
    assert {host, sender} == {"p1", "p2"}
    assert body == {"prompt_token_ids": PROMPT[: 2 * PAGE], "start": PAGE, "end": 2 * PAGE}
    assert "audit" not in caplog.text


@in_loop
async def test_a_difference_names_both_servers_the_request_the_page_and_its_layers(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert await audit(tokenizer, Auditors(answering(WRONG), "same", "same")) == {"different": 1.0}
    (line,) = [record.getMessage() for record in caplog.records if "audit" in record.getMessage()]
    for word in (*URLS[:2], "cmpl-", "tokens 16 to 31 (page 1)", "in 1 layers (kv 1)"):
        assert word in line


def refusing(status: int) -> Callable[[str, dict[str, Any]], httpx.Response]:
    return lambda _host, _body: httpx.Response(status, json={"error": {"code": "x", "message": "no"}})


def broken(_host: str, _body: dict[str, Any]) -> httpx.Response:
    raise httpx.ReadError("it was killed")


@pytest.mark.parametrize(
    ("answer", "computations", "expected"),
    [
        (answering(TRUE), ("same",), "no_server"),
        (answering(TRUE), ("same", "another CPU"), "other_computation"),
        (answering(TRUE), ("same", None), "other_computation"),  # another release
        (answering(TRUE), (None, None), "other_computation"),
        (answering(WRONG, "another CPU"), ("same", "same"), "other_computation"),  # started again meanwhile
        (refusing(429), ("same", "same"), "busy"),
        (refusing(503), ("same", "same"), "busy"),
        (refusing(404), ("same", "same"), "failed"),
        (refusing(400), ("same", "same"), "failed"),
        (broken, ("same", "same"), "failed"),
        (lambda _host, _body: httpx.Response(200, content=b"{"), ("same", "same"), "failed"),
        (answering({"latent": ("aa",)}), ("same", "same"), "failed"),
    ],
)
@in_loop
async def test_what_cannot_be_compared_is_skipped(
    answer: Any, computations: tuple[str | None, ...], expected: str, tokenizer: Tokenizer
) -> None:
    assert await audit(tokenizer, Auditors(answer, *computations)) == {expected: 1.0}


@in_loop
async def test_an_answer_that_does_not_come(tokenizer: Tokenizer) -> None:
    prefills = Auditors(answering(TRUE), "same", "same")
    prefills.goes_on.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audits, "AUDIT_S", 0.05)
        assert await audit(tokenizer, prefills) == {"late": 1.0}


@in_loop
async def test_one_at_a_time(tokenizer: Tokenizer) -> None:
    prefills = Auditors(answering(TRUE), "same", "same")
    prefills.goes_on.clear()  # until all prompts have been answered
    assert await audit(tokenizer, prefills, prompts=4) == {"equal": 1.0, "busy": 3.0}
    assert len(prefills.audited) == 1


@in_loop
async def test_an_answer_that_ends_before_its_first_pass_has_no_page(tokenizer: Tokenizer) -> None:
    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        return [*reserving(link, submit), *saying(tokenizer, "hello")(link, submit)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audits, "LATE_S", 0.05)
        assert await audit(tokenizer, Auditors(answering(TRUE), "same", "same"), script) == {"no_page": 1.0}


@in_loop
async def test_a_digest_that_a_stage_reports_behind_the_end(tokenizer: Tokenizer) -> None:
    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        reserved, digested, *rest = digesting(tokenizer, TRUE)(link, submit)
        return [reserved, *rest, digested]

    assert await audit(tokenizer, Auditors(answering(TRUE), "same", "same"), script) == {"equal": 1.0}


@in_loop
async def test_off_by_default(tokenizer: Tokenizer) -> None:
    prefills = Auditors(answering(TRUE), "same", "same")
    assert await audit(tokenizer, prefills, rate=0.0) == {}
    assert not prefills.audited


def test_a_dishonest_server_is_found_after_as_many_prompts_as_theory_says() -> None:
    """One of three servers computes a share of its pages wrong; 400 runs until the first difference, each prompt with a
    page of its own. The mean of a geometric distribution is 1 / p."""
    random = Random(5)
    for rate, wrong in ((0.01, 1.0), (0.1, 0.25)):
        found = [_prompts_until_found(rate, wrong, random) for _ in range(400)]
        assert mean(found) == pytest.approx(1 / (rate * wrong), rel=0.15)  # three standard errors


def _prompts_until_found(rate: float, wrong: float, random: Random) -> int:
    """By the draws of PrefillAudits; a page is wrong by chance."""
    drawn = audits.PrefillAudits(None, None, rate, random)  # type: ignore[arg-type]
    request = GenerationRequest(rid="r", prompt=tuple(PROMPT), sampling=SamplingParams())
    bad = {page for page in range(len(PROMPT)) if random.random() < wrong}
    prompts = 0
    while True:
        prompts += 1
        audit = drawn.draw(request, PrefillServer(URLS[0]))
        if audit is not None and int(audit.share * len(PROMPT)) in bad:
            return prompts
        bad = {page for page in range(len(PROMPT)) if random.random() < wrong} if audit is not None else bad


def reproducible(**changes: Any) -> ServerInfo:
    info = server_info(control_port=5555)
    assert info.stages is not None
    fields = {"reproducible": True, "computations": (COMPUTATION,)} | changes
    stages: StagePools = msgspec.structs.replace(info.stages, **fields)
    return msgspec.structs.replace(info, stages=stages)


AUDIT = {"prompt_token_ids": PROMPT, "start": PAGE, "end": 2 * PAGE + 3}


@in_loop
async def test_a_page_is_computed_in_the_lowest_class_and_found_by_nobody(tokenizer: Tokenizer) -> None:
    def script(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        assert submit.digest is not None
        start, end = submit.digest
        digested = KvDigested(rid=submit.rid, start=start, end=end, digest=TRUE)
        end_of_it = finished(submit.rid, DISCARDED)
        return [digested, end_of_it] if len(link.of(Submit)) == 1 else [end_of_it, digested]

    link = FakeLink(script)
    link.info = reproducible()
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        answer = json_of(await http.post("/v1/audits", json=AUDIT))
        again = await http.post("/v1/audits", json=AUDIT)
        found = json_of(await http.get("/v1/handoff"))["computation"]
    assert answer == {"computation": found, "digest": {"kv": ["aa", "bb"]}}
    assert "float32" in found
    assert again.status_code == 200
    first, second = link.of(Submit)
    assert (first.open, first.route, first.digest) == (True, Discard(), (PAGE, 2 * PAGE + 3))
    tokens = unpack(first.prompt).tolist()
    assert tokens[: 2 * PAGE + 3] == PROMPT[: 2 * PAGE + 3]
    assert len(tokens) == 3 * PAGE + 1, "whole pages are computed of it"
    assert first.terms.cache_salt
    assert first.terms.cache_salt != second.terms.cache_salt
    hint = link.of(KvHint)[0]
    assert (hint.prompt, hint.terms.cache_salt, hint.actions) == (first.prompt, first.terms.cache_salt, (Release(),))


@in_loop
async def test_one_page_at_a_time_is_computed(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    link.info = reproducible()
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        waiting = asyncio.create_task(http.post("/v1/audits", json=AUDIT))
        submit = await link.wait_for(Submit)
        busy = await http.post("/v1/audits", json=AUDIT)
        assert (busy.status_code, json_of(busy)["error"]["code"]) == (429, "queue_full")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(audits, "LATE_S", 0.05)
            link.say(finished(submit.rid, DISCARDED))
            gave_way = await waiting
        assert (gave_way.status_code, json_of(gave_way)["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize(
    ("role", "changes", "body", "status", "code"),
    [
        ("colocated", {}, {}, 400, "wrong_role"),
        ("prefill", {"reproducible": False}, {}, 400, "unsupported"),
        ("prefill", {"computations": ()}, {}, 400, "unsupported"),
        ("prefill", {}, {"start": 2 * PAGE + 3}, 400, "invalid_value"),
        ("prefill", {}, {"end": len(PROMPT) + 1}, 400, "invalid_value"),
        ("prefill", {}, {"prompt_token_ids": [999]}, 400, "invalid_token"),
    ],
)
@in_loop
async def test_what_cannot_be_audited_is_refused(
    role: str, changes: dict[str, Any], body: dict[str, Any], status: int, code: str, tokenizer: Tokenizer
) -> None:
    link = FakeLink()
    link.info = reproducible(**changes)
    async with running(link, tokenizer, role=role) as service, client(service) as http:
        answer = await http.post("/v1/audits", json=AUDIT | body)
    assert (answer.status_code, json_of(answer)["error"]["code"]) == (status, code)
    assert not link.of(Submit)
