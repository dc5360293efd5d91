"""Through the gateway a stock SGLang says what transformers says: make test-sglang. float32, greedy."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from headrace.server.upstream.handoff_params import NO_TRANSFER_HOST
from tests.e2e import gold
from tests.engine.models import smollm2
from tests.gateway.sglang_engine.engine import Sglang, answered
from tests.gateway.sglang_engine.site import Site
from tests.integrations.vllm.sides import prompt
from tests.routers.test_texts import streamed

pytestmark = pytest.mark.sglang

GENERATE, COMPLETION, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
TOKENS = 12
GREEDY = {"temperature": 0, "max_tokens": TOKENS, "model": "whatever SGLang calls it"}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]


def generate(ids: list[int], **sampling: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, **sampling}}


def expected(ids: list[int], tokens: int = TOKENS) -> str:
    return gold.greedy_text(tuple(ids), tokens)


def chat_ids() -> list[int]:
    found = gold.tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    return list(found["input_ids"])


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 100, 256, 844])
def test_prompts_of_token_ids(site: Site, length: int) -> None:
    ids = prompt(length, at=3 * length)
    answer = answered(site.ask(GENERATE, generate(ids)))
    assert answer["text"] == expected(ids)
    assert answer["meta_info"]["prompt_tokens"] == length


def test_the_kv_is_the_prefill_servers(site: Site) -> None:
    """A prompt of the same length at the other side alone: the engine goes on from what it was sent."""
    theirs, ours = prompt(200, at=3000), prompt(200, at=4000)
    fields = site.named({})
    with ThreadPoolExecutor(1) as pool:
        body = {**generate(theirs), **fields}
        second = pool.submit(site.engine.client.post, GENERATE, json=body)
        answer = answered(site.gateway.post(GENERATE, {**generate(ours), **fields}))
        text = answered(second.result())["text"]
    first = gold.greedy(tuple(ours), 1)
    assert text.startswith(gold.tokenizer().decode(first))
    assert text != expected(theirs)
    assert answer["meta_info"]["prompt_tokens"] == 200


def test_the_first_token_alone(site: Site) -> None:
    ids = prompt(90, at=11)
    answer = answered(site.ask(GENERATE, generate(ids, max_new_tokens=1)))
    assert answer["text"] == expected(ids, 1)
    assert answer["meta_info"]["completion_tokens"] == 1


def test_texts_and_several_at_once(site: Site) -> None:
    texts = [gold.tokenizer().decode(prompt(60 + 40 * number, at=500 * number)) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda text: site.ask(COMPLETION, {**GREEDY, "prompt": text}), texts))
    for text, answer in zip(texts, answers, strict=True):
        assert answered(answer)["choices"][0]["text"] == expected(gold.tokenizer()(text)["input_ids"])


def test_chats_whole_and_as_streams(site: Site) -> None:
    body = {**GREEDY, "messages": MESSAGES}
    whole = answered(site.ask(CHAT, body))["choices"][0]["message"]["content"]
    assert whole == expected(chat_ids())
    assert streamed(site.ask(CHAT, {**body, "stream": True})) == {0: whole}
    text = streamed(site.ask(COMPLETION, {**GREEDY, "prompt": prompt(70), "stream": True}))
    assert text == {0: expected(prompt(70))}


def test_a_schema_holds_from_the_first_token_on(site: Site) -> None:
    """The prefill server samples that one."""
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["blue", "green"]}, "certain": {"type": "boolean"}},
        "required": ["color", "certain"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = answered(site.ask(CHAT, {**GREEDY, "max_tokens": 40, "messages": MESSAGES, "response_format": form}))
    found = json.loads(answer["choices"][0]["message"]["content"])
    assert found["color"] in ("blue", "green")
    assert isinstance(found["certain"], bool)


def test_stop_strings_and_penalties(site: Site) -> None:
    ids = prompt(120, at=900)
    text = expected(ids, 24)
    stop = text[8:11]
    answer = answered(site.ask(GENERATE, generate(ids, max_new_tokens=24, stop=[stop])))
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"]["matched"] == stop
    penalized = answered(site.ask(GENERATE, generate(ids, frequency_penalty=1.5, max_new_tokens=24)))
    assert penalized["text"] != text


def test_logprobs_of_the_first_token_come_from_the_prefill_server(site: Site) -> None:
    ids = prompt(150, at=1300)
    body = {**generate(ids), "return_logprob": True, "top_logprobs_num": 2}
    meta = answered(site.ask(GENERATE, body))["meta_info"]
    tokens = gold.greedy(tuple(ids), TOKENS)
    with torch.inference_mode():
        logits = smollm2()(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    wanted = torch.log_softmax(logits, -1)
    assert [token for _, token, *_ in meta["output_token_logprobs"]] == list(tokens)
    for place, (logprob, token, *_) in enumerate(meta["output_token_logprobs"]):
        assert logprob == pytest.approx(float(wanted[place, token]), abs=2e-3), place
    top = wanted[0].topk(2)
    assert [token for _, token, *_ in meta["output_top_logprobs"][0]] == top.indices.tolist()
    assert [one for one, *_ in meta["output_top_logprobs"][0]] == pytest.approx(top.values.tolist(), abs=2e-3)


def test_what_the_engine_has_in_its_radix_cache_is_not_sent(site: Site) -> None:
    """Of the second prompt a part, of the third all: the first token alone comes."""
    ids = prompt(400, at=5000)
    written = lambda: site.gateway.metrics()["headrace_gateway_tokens_written_total"]  # noqa: E731
    for length, sent in ((256, 256), (400, 400 - 256), (384, 0)):
        before = written()
        answer = answered(site.ask(GENERATE, generate(ids[:length])))
        assert answer["text"] == expected(ids[:length])
        assert written() - before == pytest.approx(sent, abs=16), length


def test_cached_tokens_are_those_of_the_prefill_server(site: Site) -> None:
    ids = prompt(600, at=4400)
    warm_up = {"bootstrap_host": NO_TRANSFER_HOST, "bootstrap_room": 0}  # computed, and sent to no engine
    answered(site.gateway.post(GENERATE, {**generate(ids[:500], max_new_tokens=1), **warm_up}))
    meta = answered(site.ask(GENERATE, generate(ids)))["meta_info"]
    assert 400 < meta["cached_tokens"] <= 500


def test_nothing_of_headrace_is_in_the_engines_environment(engine: Sglang) -> None:
    python = str(engine.process.args[0])  # type: ignore[index]
    for name in ("headrace", "gateway"):
        done = subprocess.run(
            [python, "-c", f"import {name}"], env=engine.environment, cwd="/", capture_output=True, text=True
        )
        assert "ModuleNotFoundError" in done.stderr, done.stderr
    here = psutil.Process(engine.process.pid)
    for process in (here, *here.children(recursive=True)):
        assert not [each.path for each in process.memory_maps() if "headrace" in each.path]
