"""Constraints in the front end: checked in a process of their own, and sent to prefill servers that know them."""

import asyncio
import json
import signal
import subprocess
import sys
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.types.errors import HeadraceError
from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.checker import CheckerConfig
from headrace.server.frontend.grammar_checker import GrammarChecker
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ANSWER, Prefills, decode, fetched
from tests.server.fakes import FakeLink, in_loop, json_of
from tests.server.frontend.test_failover import URLS, Several, metrics, moves, refusal, three
from tests.server.frontend.test_prefill_servers import prefill_of

STUB = CheckerConfig("stub", "", 1000)
LARGE = Constraint("json", json.dumps({"enum": [f"value {number}" for number in range(4000)]}))


@in_loop
async def test_a_constraint_that_takes_too_long_ends_its_process_and_no_other_request() -> None:
    checker = GrammarChecker(STUB)
    assert await checker.problem(Constraint("regex", "a")) == ""
    hasty = GrammarChecker(msgspec.structs.replace(STUB, check_s=0.001))
    assert "takes longer than 0.001 s" in await hasty.problem(LARGE)
    assert "takes longer than 0.001 s" in await hasty.problem(LARGE), "it is not tried again"
    assert await checker.problem(LARGE) == ""
    assert "not allowed" in await checker.problem(Constraint("regex", "a"), ord("b"))
    assert await checker.problem(Constraint("regex", "a"), ord("a")) == ""
    await hasty.close()
    await checker.close()


@in_loop
async def test_a_request_that_is_given_up_does_not_confuse_the_next_one() -> None:
    checker = GrammarChecker(STUB)
    given_up = asyncio.create_task(checker.problem(Constraint("regex", "(")))
    while checker._child._process is None:
        await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert await checker.problem(Constraint("regex", "a")) == ""
    await checker.close()


@in_loop
async def test_slow_constraints_of_one_client_keep_nobody_waiting() -> None:
    """Each takes all of its time. The process that has the vocabulary stays."""
    checker = GrammarChecker(msgspec.structs.replace(STUB, check_s=0.05))
    known = Constraint("regex", "ab")
    assert await checker.problem(known, client="good") == ""
    process = checker._child._process
    slow = [Constraint("regex", f"((a{{{1000 + n}}}){{1000}}){{1000}}") for n in range(16)]
    attack = [asyncio.create_task(checker.problem(each, client="bad")) for each in slow]
    await asyncio.sleep(0)
    assert await checker.problem(Constraint("regex", "new"), client="good") == ""
    assert await checker.problem(known, ord("a"), client="good") == ""
    assert await checker.problem(known, client="good") == ""
    assert sum(task.done() for task in attack) < 8, "the others waited for their turns"
    found = await asyncio.gather(*attack)
    assert all("longer than 0.05 s" in each for each in found), found
    assert checker._child._process is process
    assert process is not None
    assert process.returncode is None
    await checker.close()


@in_loop
async def test_a_child_that_ends_is_an_error_and_the_next_one_is_started() -> None:
    checker = GrammarChecker(STUB)
    assert await checker.problem(Constraint("regex", "a")) == ""
    process = checker._child._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    asked = asyncio.create_task(checker.problem(Constraint("regex", "b")))
    await asyncio.sleep(0.05)
    process.kill()
    with pytest.raises(HeadraceError, match="has ended; retry") as error:
        await asked
    assert error.value.info.status == 503
    assert await checker.problem(Constraint("regex", "b")) == ""
    await checker.close()


@in_loop
async def test_a_prefill_server_of_an_earlier_version_is_not_asked(tokenizer: Tokenizer) -> None:
    body = {"prompt": "hi", "structured_outputs": {"choice": ["hello"]}}
    old = Prefills()
    async with decode(FakeLink(fetched(tokenizer)), tokenizer, old) as (service, http):
        service.model._grammars = GrammarChecker(STUB)
        answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_structured_output")
        assert not old.posts
        assert (await http.post("/v1/completions", json={"prompt": "hi"})).status_code == 200


@pytest.mark.parametrize("field", [{"logit_bias": {"5": 1}}, {"repetition_penalty": 1.2}])
@in_loop
async def test_nor_for_penalties(field: dict[str, Any], tokenizer: Tokenizer) -> None:
    old = Prefills()
    async with decode(FakeLink(fetched(tokenizer)), tokenizer, old) as (_, http):
        answer = await http.post("/v1/completions", json={"prompt": "hi", **field})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_penalties")
        assert not old.posts
    new = Prefills()
    new.more = {"penalties": True}
    async with decode(FakeLink(fetched(tokenizer)), tokenizer, new) as (_, http):
        assert (await http.post("/v1/completions", json={"prompt": "hi", **field})).status_code == 200
        assert new.posts[0][1].items() >= field.items()


@pytest.mark.parametrize("knows", [False, True])
@in_loop
async def test_an_earlier_version_is_asked_for_all_logprobs_of_a_prompt(knows: bool, tokenizer: Tokenizer) -> None:
    """It refuses prompt_logprobs_start; what it computes before that position is left out here."""

    def answer(body: dict[str, Any]) -> httpx.Response:
        assert knows or "prompt_logprobs_start" not in body
        first = body.get("prompt_logprobs_start", 1)
        entries = [{"id": 1, "text": "x", "logprob": -1.0 - place, "top_logprobs": []} for place in range(4)]
        scored = [entry if place >= first else None for place, entry in enumerate(entries)]
        return httpx.Response(200, json=ANSWER | {"prompt_logprobs": scored})

    prefills = Prefills(answer)
    prefills.more = {"prompt_logprobs_start": True} if knows else {}
    body = {"prompt": [1, 1, 1, 1], "prompt_logprobs": 0, "prompt_logprobs_start": 2}
    async with decode(FakeLink(fetched(tokenizer)), tokenizer, prefills) as (_, http):
        found = json_of(await http.post("/v1/completions", json=body))["choices"][0]["prompt_logprobs"]
        assert [entry and entry["logprob"] for entry in found] == [None, None, -3.0, -4.0]
        assert prefills.posts[0][1].get("prompt_logprobs_start") == (2 if knows else None)


@in_loop
async def test_prefill_servers_get_the_constraint(tokenizer: Tokenizer) -> None:
    new, link = Prefills(), FakeLink(fetched(tokenizer, "hello"))
    new.more = {"structured_outputs": True}
    text = tokenizer.encode("hello")[0]
    body = {"prompt": "hi", "max_tokens": 3, "guided_choice": [tokenizer.piece(text)]}
    async with decode(link, tokenizer, new) as (service, http):
        service.model._grammars = GrammarChecker(STUB)
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code in (200, 502), answer.text  # the tiny tokenizer's ids are not the stub's
        assert new.posts[0][1]["structured_outputs"] == {"choice": body["guided_choice"]}
        (submit,) = link.of(Submit)
        assert submit.constraint == Constraint("choice", json.dumps(body["guided_choice"]))
        assert submit.sampling.grammar == submit.constraint.key
        assert "grammar" not in new.posts[0][1]


class FirstRefused(GrammarChecker):
    """Takes every constraint, and no first token from a prefill server until it has refused one."""

    def __init__(self) -> None:
        super().__init__(STUB)
        self.refused = 0

    async def problem(self, constraint: Constraint, first: int | None = None, *, client: str = "") -> str:
        if first is None or self.refused:
            return ""
        self.refused += 1
        return "not allowed"


CHOICE = {"prompt": [1, 2, 3], "structured_outputs": {"choice": ["hello"]}}


@in_loop
async def test_the_next_prefill_server_gets_the_constraint_too(tokenizer: Tokenizer) -> None:
    prefills = Several(p1=httpx.ConnectError("connection refused"))
    prefills.more = {"structured_outputs": True}
    async with three(tokenizer, prefills) as (link, http, service):
        service.model._grammars = FirstRefused()
        service.model._grammars.refused = 1
        assert (await http.post("/v1/completions", json=CHOICE)).status_code == 200
        first, second = link.of(Submit)
        assert first.constraint == second.constraint == Constraint("choice", '["hello"]')
        assert first.sampling == second.sampling
        assert [body["structured_outputs"] for _, body, _ in prefills.posts] == [CHOICE["structured_outputs"]] * 2


@in_loop
async def test_a_first_token_that_was_not_masked_moves_the_prompt(tokenizer: Tokenizer) -> None:
    prefills = Several()
    prefills.more = {"structured_outputs": True}
    async with three(tokenizer, prefills) as (link, http, service):
        service.model._grammars = FirstRefused()
        response = await http.post("/v1/completions", json=CHOICE)
        assert (response.status_code, json_of(response)["choices"][0]["text"]) == (200, "hello")
        first, second = link.of(Submit)
        assert (prefill_of(first), prefill_of(second)) == URLS[:2]
        assert first.rid == second.rid
        assert await metrics(http) == moves(failed=1) | {'prefill_retried_requests_total{outcome="finished"}': 1}


@in_loop
async def test_a_constraint_is_not_moved_to_an_earlier_version(tokenizer: Tokenizer) -> None:
    class One(Several):
        """Only the first server knows constraints."""

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.more = {"structured_outputs": request.url.host == "p1"}
            return await super().handle_async_request(request)

    prefills = One(p1=refusal(429, "queue_full", "7"))
    async with three(tokenizer, prefills) as (_, http, service):
        service.model._grammars = FirstRefused()
        response = await http.post("/v1/completions", json=CHOICE)
        assert (response.status_code, json_of(response)["error"]["code"]) == (429, "queue_full")
        assert prefills.hosts == ["p1"]


def test_neither_process_loads_torch_and_only_the_child_the_library() -> None:
    load = "import headrace.server.app, headrace.engine.grammar.checker as checker, sys\n"
    compiled = "checker.GrammarCompiler('stub', '', 1000).load()\n"
    for code, found in ((load, []), (load + compiled, ["llguidance"])):
        said = "print(sorted({'torch', 'transformers', 'llguidance'} & set(sys.modules)))"
        child = subprocess.run([sys.executable, "-c", code + said], capture_output=True, text=True, check=True)
        assert child.stdout.strip() == str(found)
