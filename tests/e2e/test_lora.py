"""LoRA adapters on servers: chosen by name, beside each other, handed over; what one of two servers lacks is a 404."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.engine.model.stub import stub_tokenizer
from tests.e2e.expert_models import TOKENS, Texts, clear_texts, family
from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.texts import complete
from tests.engine.lora import Adapter, save_adapter
from tests.engine.models import save_model

LENGTHS = (5, 40, 90)
SIZES = ("--kv-pages", "256", "--chunk-tokens", "32", "--threads", "1", "--served-model-name", "base")


class Made(NamedTuple):
    folder: Path
    model: PreTrainedModel
    adapters: dict[str, Adapter]

    def flags(self, *names: str, **others: str) -> tuple[str, ...]:
        """names: adapters as they are called. others: an adapter's weights by another name."""
        named = {name: name for name in names} | others
        loras = [flag for name, which in named.items() for flag in ("--lora", self.adapters[which].flag(name))]
        return ("--model", str(self.folder), *SIZES, *loras)

    def texts(self, name: str) -> Texts:
        """What peft's model says."""
        model: Any = self.adapters[name].model if name != "base" else self.model
        return clear_texts(self.folder, LENGTHS, model)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("model")
    model = save_model(family("qwen3"), folder).model
    stub_tokenizer("stub:vocab=300").save(str(folder / "tokenizer.json"))
    kinds: dict[str, Any] = {
        "one": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "two": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
        "other": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    }
    adapters = {
        name: save_adapter(model, tmp_path_factory.mktemp(name), seed, **fields)
        for seed, (name, fields) in enumerate(kinds.items())
    }
    return Made(folder, AutoModelForCausalLM.from_pretrained(folder).eval(), adapters)


def check_all(server: Server, made: Made) -> None:
    """Both adapters and the model itself, all at once; and again, from cached prefixes."""
    expected = {(name, prompt): text for name in ("one", "two", "base") for prompt, text in made.texts(name).items()}
    prompts = {prompt for _, prompt in expected}
    for _ in range(2):
        with ThreadPoolExecutor(len(expected)) as pool:
            texts = pool.map(lambda each: complete(server, each[1], TOKENS, model=each[0]), expected)
            assert dict(zip(expected, texts, strict=True)) == expected
    assert len(prompts) < len(expected), "some prompts are of several models"


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def ask(server: Server, model: str, prompt: tuple[int, ...] = tuple(range(40)), **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": list(prompt), "max_tokens": 2, "temperature": 0, **fields}
    return server.post("/v1/completions", body)


@pytest.mark.full
@pytest.mark.parametrize(
    ("prefill_flags", "decode_flags"),
    [
        (("--pp", "2"), ()),
        pytest.param(("--tp", "2"), ("--tp", "2", "--pp", "2"), marks=pytest.mark.full),
        pytest.param(("--decoder", "library", "--pp", "2"), ("--decoder", "library"), marks=pytest.mark.full),
        pytest.param(("--dp", "2"), ("--dp", "2"), marks=pytest.mark.full),
    ],
)
def test_texts_behind_a_handoff_are_those_of_peft(
    made: Made, prefill_flags: tuple[str, ...], decode_flags: tuple[str, ...]
) -> None:
    flags = made.flags("one", "two")
    with pair((*flags, *prefill_flags), (*flags, *decode_flags)) as (prefill, decode):
        check_all(decode, made)
        wait_until(lambda: prefill.total("headrace_bytes_sent_total") > 0, 5, "the stages' counters, once a second")
        assert ask(decode, "one").json()["model"] == "one"
        entries = decode.get("/v1/models").json()["data"]
        assert [(each["id"], each["parent"]) for each in entries] == [("base", None), ("one", "base"), ("two", "base")]
        assert decode.get("/v1/models/two").json()["root"] == str(made.adapters["two"].folder)
        assert prefill.get("/server_info").json()["adapters"] == decode.get("/server_info").json()["adapters"]


@pytest.mark.full
def test_one_server_caches_prefixes_for_each_adapter_apart(made: Made) -> None:
    with serving("--role", "colocated", *made.flags("one", "two", same="one")) as server:
        check_all(server, made)
        prompt = tuple(range(100, 164))

        def cached(model: str, **fields: Any) -> int:
            usage = ask(server, model, prompt, **fields).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [cached(model) for model in ("one", "two", "base")] == [0, 0, 0]
        assert all(cached(model) > 0 for model in ("one", "two", "base", "same"))
        assert cached("one", cache_salt="x") == 0
        answer = server.post(
            "/generate", {"model": "two", "input_ids": list(prompt), "sampling_params": {"max_new_tokens": 1}}
        )
        assert answer.json()["meta_info"]["cached_tokens"] > 0


@pytest.fixture(scope="module")
def uneven(made: Made) -> Iterator[tuple[Server, Server]]:
    """A pair of which each side lacks an adapter, and both have other weights under one name."""
    prefill = made.flags("one", "other", shared="one")
    decode = made.flags("one", "two", shared="two")
    with pair(prefill, decode) as servers:
        yield servers


def test_an_adapter_that_the_decode_server_lacks(uneven: tuple[Server, Server]) -> None:
    _, decode = uneven
    status, code, message = error_of(ask(decode, "other"))
    assert (status, code) == (404, "model_not_found")
    assert message == "model 'other' is not served here; this is 'base' with adapters one, two, shared"


def test_an_adapter_that_the_prefill_server_lacks(uneven: tuple[Server, Server]) -> None:
    prefill, decode = uneven
    computed = prefill.total("headrace_computed_tokens_total")
    status, code, message = error_of(ask(decode, "two"))
    assert (status, code) == (404, "model_not_found")
    assert "model 'two' is not served here" in message
    assert prefill.total("headrace_computed_tokens_total") == computed
    check_nothing_leaks(uneven)


def test_other_weights_under_the_same_name(uneven: tuple[Server, Server]) -> None:
    _, decode = uneven
    status, code, message = error_of(ask(decode, "shared"))
    assert (status, code) == (404, "model_not_found")
    assert "the prefill server computes the prompt with adapter" in message
    check_nothing_leaks(uneven)


@pytest.mark.parametrize(("there", "here"), [("one", "base"), ("base", "one"), ("shared", "shared"), ("other", "one")])
def test_a_router_that_names_other_adapters(uneven: tuple[Server, Server], there: str, here: str) -> None:
    prefill, decode = uneven
    held = ask(prefill, there, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    status, code, message = error_of(ask(decode, here, kv_transfer_params=held.json()["kv_transfer_params"]))
    assert (status, code) == (404, "model_not_found")
    assert "the prefill server computes the prompt with" in message
    check_nothing_leaks(uneven)


def check_nothing_leaks(servers: tuple[Server, Server]) -> None:
    for server in servers:
        wait_until(lambda server=server: pages_in_use(server) == 0, 5, "pages to be given back")
    assert complete(servers[1], tuple(range(7)), 2, model="one")
