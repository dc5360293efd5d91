"""Hidden states and draft data in responses: SGLang's form on POST /generate, a compact one on POST /v1/prefill."""

import asyncio
import base64
import struct
from collections.abc import Iterable
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply, Held, HiddenPart, Reserved, Tokens
from headrace.core.types.packed import packed_length
from headrace.core.types.requests.draft import DraftTokens, HiddenStates
from headrace.core.types.requests.request import FetchFrom, Timing, Usage
from headrace.server.api.response import hidden_format
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ANSWER, Prefills, decode
from tests.server.fakes import HIDDEN_SIZE, FakeLink, client, finished, in_loop, json_of, running, saying

DRAFT = DraftTokens((7, 8), (0.75, 0.125))


def state(position: int) -> list[float]:
    return [position + index / 4 for index in range(HIDDEN_SIZE)]


def made_up(start: int, count: int, dtype: str = "float32") -> HiddenStates:
    values = [value for position in range(start, start + count) for value in state(position)]
    if dtype == "bfloat16":
        data = b"".join(struct.pack("<f", value)[2:] for value in values)
    else:
        data = struct.pack(f"<{len(values)}{'f' if dtype == 'float32' else 'e'}", *values)
    return HiddenStates(start, HIDDEN_SIZE, dtype, data)


def computing(tokenizer: Tokenizer, text: str = "hello world", dtype: str = "float32") -> Any:
    """A scheduler that reports the states of the prompt in two parts, and one with each generated token but the last,
    where it computes the prompt itself."""

    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        length = packed_length(submit.prompt)
        fetches = isinstance(submit.route, FetchFrom)
        *tokens, end = saying(tokenizer, text)(link, submit)
        if fetches:
            yield Reserved(rid=submit.rid)
        elif submit.sampling.hidden_states == "all" and length > 1:
            yield HiddenPart(rid=submit.rid, states=made_up(0, 1, dtype))
        if submit.sampling.hidden_states and not fetches:
            start = 1 if submit.sampling.hidden_states == "all" and length > 1 else length - 1
            yield HiddenPart(rid=submit.rid, states=made_up(start, length - start, dtype))
        for index, each in enumerate(tokens):
            yield each
            if submit.sampling.hidden_states == "all":  # one more than is needed, as planned ahead
                yield HiddenPart(rid=submit.rid, states=made_up(length + index, 1, dtype))
        yield end

    return script


def handing_over(_link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
    rid, length = submit.rid, packed_length(submit.prompt)
    wanted = submit.sampling.hidden_states
    parts = {None: [], "last": [made_up(length - 1, 1)], "all": [made_up(0, 1), made_up(1, length - 1)]}[wanted]
    draft = DRAFT if submit.sampling.draft_top_k else None
    return [
        *(HiddenPart(rid=rid, states=part) for part in parts),
        Tokens(rid=rid, tokens=(7,), draft=draft),
        finished(rid, "handed_over", prompt=length),
    ]


def held(_link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
    *before, _ = handing_over(_link, submit)
    return [*before, Held(rid=submit.rid, lease_s=3.0, usage=Usage(3, 1, 0), timing=Timing())]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@in_loop
async def test_generate_answers_as_sglang_does(tokenizer: Tokenizer, dtype: str) -> None:
    """The prompt's states as a list, then one for each generated token but the last, which nothing was computed for."""
    link = FakeLink(computing(tokenizer, dtype=dtype))
    async with running(link, tokenizer) as service, client(service) as http:
        body = {"input_ids": [1, 2, 3], "return_hidden_states": True}
        answer = json_of(await http.post("/generate", json=body))
        plain = json_of(await http.post("/generate", json={"input_ids": [1, 2, 3], "return_hidden_states": False}))
    count = len(answer["output_ids"])
    prompt, *generated = answer["meta_info"]["hidden_states"]
    assert prompt == [state(position) for position in range(3)]
    assert generated == [state(3 + index) for index in range(count - 1)]
    assert "hidden_states" not in plain["meta_info"]
    assert [submit.sampling.hidden_states for submit in link.of(Submit)] == ["all", None]


@in_loop
async def test_each_prompt_and_choice_has_its_own(tokenizer: Tokenizer) -> None:
    body = {"input_ids": [[1, 2, 3], [4]], "return_hidden_states": True, "sampling_params": {"n": 2}}
    async with running(FakeLink(computing(tokenizer)), tokenizer) as service, client(service) as http:
        answers = json_of(await http.post("/generate", json=body))
    assert [len(answer["meta_info"]["hidden_states"][0]) for answer in answers] == [3, 3, 1, 1]


@in_loop
async def test_a_stream_has_them_in_its_last_object(tokenizer: Tokenizer) -> None:
    body = {"input_ids": [1, 2, 3], "return_hidden_states": True, "stream": True}
    async with running(FakeLink(computing(tokenizer)), tokenizer) as service, client(service) as http:
        text = (await http.post("/generate", json=body)).text
    events = [msgspec.json.decode(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    assert ["hidden_states" in event["meta_info"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["meta_info"]["hidden_states"][0] == [state(position) for position in range(3)]


@pytest.mark.parametrize(("wanted", "start", "count"), [("last", 2, 1), ("all", 0, 3)])
@in_loop
async def test_a_prefill_answers_with_elements_in_base64(
    tokenizer: Tokenizer, wanted: str, start: int, count: int
) -> None:
    body = {"prompt_token_ids": [1, 2, 3], "ticket": "t", "hidden_states": wanted, "draft_top_k": 2}
    for script, fields in ((handing_over, {}), (held, {"handoff": "hold"})):
        link = FakeLink(script)
        async with running(link, tokenizer, role="prefill") as service, client(service) as http:
            answer = json_of(await http.post("/v1/prefill", json=body | fields))
        found = answer["hidden_states"]
        assert (found["start"], found["shape"], found["dtype"]) == (start, [count, HIDDEN_SIZE], "float32")
        values = struct.unpack(f"<{count * HIDDEN_SIZE}f", base64.b64decode(found["data"]))
        assert list(values) == [value for position in range(start, 3) for value in state(position)]
        assert answer["draft"] == {"top_ids": [7, 8], "top_probs": [0.75, 0.125]}
        assert link.of(Submit)[0].sampling.draft_top_k == 2


@in_loop
async def test_a_prefill_without_them_says_null(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(handing_over), tokenizer, role="prefill") as service, client(service) as http:
        answer = json_of(await http.post("/v1/prefill", json={"prompt": "x", "ticket": "t", "draft_top_k": 0}))
    assert (answer["hidden_states"], answer["draft"]) == (None, None)


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/prefill", {"hidden_states": "first"}, "hidden_states", 'is "first"; it has to be "all" or "last"'),
    ("/v1/prefill", {"hidden_states": True}, "hidden_states", "a string"),
    ("/v1/prefill", {"draft_top_k": 65}, "draft_top_k", "from 0 to 64"),
    ("/v1/prefill", {"draft_top_k": -1}, "draft_top_k", "from 0 to 64"),
    ("/generate", {"return_hidden_states": "yes"}, "return_hidden_states", "true or false"),
    ("/v1/completions", {"return_hidden_states": True}, "return_hidden_states", "POST /generate and POST /v1/prefill"),
]


@pytest.mark.parametrize(("path", "fields", "field", "says"), BAD)
@in_loop
async def test_other_values_are_refused(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], field: str, says: str
) -> None:
    body = {"text": "x"} if path == "/generate" else {"prompt": "x"}
    extra = {"handoff": "none"} if path == "/v1/prefill" else {}
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        answer = await http.post(path, json={**body, **extra, **fields})
    error = json_of(answer)["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert says in error["message"]


@in_loop
async def test_more_than_the_limit_is_refused_before_anything_is_computed(tokenizer: Tokenizer) -> None:
    """Prompts, choices and the tokens that may be generated all count."""
    link = FakeLink(computing(tokenizer))
    limit = 30 * HIDDEN_SIZE * 4
    async with running(link, tokenizer, max_hidden_bytes=limit) as service, client(service) as http:

        async def status(prompts: object, n: int = 1, tokens: int = 1) -> int:
            sampling = {"n": n, "max_new_tokens": tokens}
            body = {"input_ids": prompts, "sampling_params": sampling, "return_hidden_states": True}
            answer = await http.post("/generate", json=body)
            if answer.status_code == 413:
                error = json_of(answer)["error"]
                assert (error["param"], error["code"]) == ("return_hidden_states", "too_many_hidden_states")
                assert f"--max-hidden-bytes allows {limit} " in error["message"]
            return answer.status_code

        assert await status([1] * 29) == 200
        assert await status([1] * 30) == 413
        assert await status([1] * 20, tokens=10) == 200
        assert await status([1] * 20, tokens=11) == 413
        assert await status([[1] * 9] * 3) == 200
        assert await status([[1] * 9] * 3, n=2) == 413
        admitted = len(link.of(Submit))
        body = {"prompt_token_ids": [1] * 31, "handoff": "none", "hidden_states": "all"}
        assert (await http.post("/v1/prefill", json=body)).status_code == 413
        assert len(link.of(Submit)) == admitted
        assert (await http.post("/v1/prefill", json=body | {"hidden_states": "last"})).status_code == 200


@in_loop
async def test_open_requests_share_a_bound(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.frontend.request.hidden_states.LEAST_TOTAL_BYTES", 30 * HIDDEN_SIZE * 4)
    script = computing(tokenizer)
    link = FakeLink(script)
    body = {"prompt_token_ids": [1] * 20, "handoff": "none", "hidden_states": "all"}
    async with running(link, tokenizer, max_hidden_bytes=25 * HIDDEN_SIZE * 4) as service, client(service) as http:
        link.script = lambda _link, _submit: ()
        first = asyncio.create_task(http.post("/v1/prefill", json=body))
        submit = await link.wait_for(Submit)
        refused = await http.post("/v1/prefill", json=body)
        assert (refused.status_code, json_of(refused)["error"]["code"]) == (429, "queue_full")
        assert "Retry-After" in refused.headers
        for message in script(link, submit):
            link.say(message)
        assert (await first).status_code == 200
        link.script = script
        assert (await http.post("/v1/prefill", json=body)).status_code == 200


@in_loop
async def test_large_ones_are_encoded_beside_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_format, "INLINE_BYTES", 0)
    async with running(FakeLink(computing(tokenizer)), tokenizer) as service, client(service) as http:
        answer = json_of(await http.post("/generate", json={"input_ids": [1, 2, 3], "return_hidden_states": True}))
    assert answer["meta_info"]["hidden_states"][0] == [state(position) for position in range(3)]


def far_answer(states: HiddenStates | None) -> dict[str, Any]:
    if states is None:
        return ANSWER
    data = base64.b64encode(states.data).decode()
    shape = [states.count, states.size]
    return ANSWER | {"hidden_states": {"start": states.start, "shape": shape, "dtype": states.dtype, "data": data}}


def knowing(states: HiddenStates | None) -> Prefills:
    """A prefill server that knows hidden states, and answers with these."""
    prefills = Prefills(lambda _body: httpx.Response(200, json=far_answer(states)))
    prefills.more = {"hidden_states": True}
    return prefills


@in_loop
async def test_an_earlier_prefill_server_is_not_asked(tokenizer: Tokenizer) -> None:
    prefills = Prefills()
    async with decode(FakeLink(computing(tokenizer)), tokenizer, prefills) as (_, http):
        answer = await http.post("/generate", json={"input_ids": [1, 2, 3], "return_hidden_states": True})
    assert (answer.status_code, json_of(answer)["error"]["code"]) == (503, "no_hidden_states")
    assert not prefills.posts


@in_loop
async def test_a_decode_server_joins_the_prompts_states_with_its_own(tokenizer: Tokenizer) -> None:
    prefills = knowing(made_up(0, 3))
    async with decode(FakeLink(computing(tokenizer)), tokenizer, prefills) as (_, http):
        answer = json_of(await http.post("/generate", json={"input_ids": [1, 2, 3], "return_hidden_states": True}))
    prompt, *generated = answer["meta_info"]["hidden_states"]
    assert prompt == [state(position) for position in range(3)]
    assert generated == [state(3 + index) for index in range(len(answer["output_ids"]) - 1)]
    ((_, asked, _),) = prefills.posts
    assert asked["hidden_states"] == "all"


@pytest.mark.parametrize(
    "states",
    [
        None,
        made_up(0, 2),
        made_up(1, 3),
        made_up(0, 3, "bfloat16"),
        HiddenStates(0, HIDDEN_SIZE * 2, "float32", made_up(0, 6).data),
    ],
)
@in_loop
async def test_a_prefill_server_that_sends_others_or_none_fails_the_request(
    tokenizer: Tokenizer, states: HiddenStates | None
) -> None:
    prefills = knowing(states)
    async with decode(FakeLink(computing(tokenizer)), tokenizer, prefills) as (_, http):
        answer = await http.post("/generate", json={"input_ids": [1, 2, 3], "return_hidden_states": True})
    assert (answer.status_code, json_of(answer)["error"]["code"]) == (502, "prefill_failed")
    assert "hidden states" in json_of(answer)["error"]["message"]


@in_loop
async def test_a_decode_server_has_none_of_a_prompt_that_a_router_sent(tokenizer: Tokenizer) -> None:
    body = {
        "input_ids": [1, 2, 3],
        "return_hidden_states": True,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": 5,
    }
    async with decode(FakeLink(computing(tokenizer)), tokenizer, allow_prefill=("127.0.0.1",)) as (_, http):
        answer = await http.post("/generate", json=body)
    error = json_of(answer)["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "return_hidden_states", "unsupported")
    assert "in that server's response" in error["message"]
