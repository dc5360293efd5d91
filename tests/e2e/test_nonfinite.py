"""NaN in weights and in fetched KV: its request fails with nonfinite_values; stages and other requests go on."""

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.conformance.scripted import HEAD_DIM, HEADS, LAYERS, PAGE, TICKET, TOKENS, Scripted, row
from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.engine.models import save_model
from tests.transfer.harness import zmq_context

VOCABULARY = 256
BAD = 77  # the token whose embedding is NaN
FLAGS = ("--dtype", "float32", "--kv-pages", "256", "--max-model-len", "512", "--chunk-tokens", "64", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one token per byte; the embedding of BAD is NaN. Its KV has the geometry of the scripted prefill
    server."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    saved = save_model(config, folder)
    with torch.no_grad():
        saved.model.get_input_embeddings().weight[BAD] = torch.nan
        saved.model.get_output_embeddings().weight[BAD] = 0.0  # never the likeliest
    saved.model.save_pretrained(folder)
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=rust).save_pretrained(folder)
    return folder


def prompt(number: int, length: int = 100, bad: int | None = None) -> list[int]:
    """Token ids of a prompt that shares no prefix with others. bad: position of BAD."""
    ids = [(number * 31 + position * 7) % VOCABULARY for position in range(length)]
    ids = [token if token != BAD else BAD + 1 for token in ids]
    if bad is not None:
        ids[bad] = BAD
    return ids


def ask(server: Server, ids: list[int], **more: Any) -> httpx.Response:
    body = {"prompt": ids, "max_tokens": 3, "temperature": 0, **more}
    return server.post("/v1/completions", body)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def failed(answer: httpx.Response) -> bool:
    if answer.status_code == 200:
        return False
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (500, "nonfinite_values", "server_error"), answer.text
    return True


def check(server: Server, behind: Server) -> None:
    """Sends good and bad prompts at once, several times. behind: the server that computes them."""
    processes = [{child.pid for child in one.children()} for one in (server, behind)]
    good = [prompt(number, length) for number, length in enumerate((100, 30, 64, 17))]
    expected = [text_of(ask(server, ids)) for ids in good]
    bad = [prompt(number, 200, at) for number, at in enumerate((0, 70, 150, 199), 20)]
    for _ in range(2):
        asked = [ids for both in zip(good, bad, strict=True) for ids in both]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda ids: ask(server, ids), asked))
        assert [failed(answer) for answer in answers] == [BAD in ids for ids in asked]
        assert [text_of(answer) for answer in answers[::2]] == expected
    for one in (server, behind):
        wait_until(lambda one=one: pages_in_use(one) == 0, 10, "pages back")
        assert one.metrics().get("headrace_integrity_errors", 0) == 0
    assert [{child.pid for child in one.children()} for one in (server, behind)] == processes, "no stage has ended"
    counted = {
        name: value for name, value in behind.metrics().items() if "requests_total{" in name and "failed" in name
    }
    assert sum(value for name, value in counted.items() if 'reason="nonfinite_values"' in name) == 2 * len(bad)
    assert sum(counted.values()) == 2 * len(bad), counted


@pytest.mark.full
@pytest.mark.parametrize("stages", ["1", "2"])
def test_bad_prompts_among_good_ones(folder: Path, stages: str) -> None:
    with serving("--role", "colocated", "--model", str(folder), "--pp", stages, *FLAGS) as server:
        check(server, server)
        cached = server.metrics()['headrace_kv_pages{state="cached"}']
        answer = ask(server, prompt(90, 300, bad=0))
        assert failed(answer)
        assert answer.json()["error"]["param"] == "prompt"
        assert server.metrics()['headrace_kv_pages{state="cached"}'] <= cached, "pages with NaN are not cached"
        sampled = {"temperature": 1.0, "top_p": 0.9, "seed": 1, "logprobs": 2, "stream": True}
        assert failed(ask(server, prompt(91, 40, bad=20), **sampled))
        assert ask(server, prompt(91, 40), **sampled).status_code == 200


@pytest.mark.full
def test_through_a_pair(folder: Path) -> None:
    flags = ("--model", str(folder), *FLAGS)
    with pair(flags, flags) as (prefill, decode):
        check(decode, prefill)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with zmq_context() as context:
        made = Scripted(context)
        yield made
        made.close()


@pytest.mark.full
def test_nan_in_fetched_kv(folder: Path, scripted: Scripted) -> None:
    """The checksum is right. The request fails with its first plan, and its KV is not cached."""
    flags = ("--model", str(folder), "--allow-prefill", "127.0.0.1", "--fallback", "local", *FLAGS)
    params = {
        "do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": scripted.control_port, "ticket": TICKET,
    }  # fmt: skip
    with serving("--role", "decode", *flags) as server, ThreadPoolExecutor(1) as pool:

        def fetched(frames: list[bytes]) -> httpx.Response:
            asked = pool.submit(ask, server, prompt(1, TOKENS), kv_transfer_params=params)
            if not scripted.hello:
                scripted.greet()
                scripted.welcome(fingerprint=scripted.hello["fingerprint"])
                scripted.came("Attach")
                scripted.send({"type": "Attached", "stage": 0})
            assert scripted.reserved()["cached_tokens"] == 0, "nothing of the prompt is cached"
            metadata = row(TICKET, scripted.reserve["generation"])
            assert scripted.deliver(0, 0, TOKENS, last=True, frames=[metadata, *frames])["type"] == "Ack"
            scripted.finish()
            return asked.result()

        for place in (0, 17, TOKENS - 1):
            changed = [bytearray(frame) for frame in scripted.kv()]
            page, slot = divmod(place, PAGE)
            struct.pack_into("<f", changed[page], 4 * HEAD_DIM * slot, float("nan"))  # a key of the first layer
            assert failed(fetched([bytes(frame) for frame in changed])), place
            assert ask(server, prompt(2, 50)).status_code == 200, "the stage goes on"
        answer = fetched(scripted.kv())
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        wait_until(lambda: pages_in_use(server) == 0, 10, "pages back")


@pytest.mark.full
def test_nan_in_kv_that_a_decode_server_returns(folder: Path, scripted: Scripted) -> None:
    """It is taken, as its checksum is right. The request that computes with it fails, and it leaves the cache."""
    flags = ("--model", str(folder), "--page-size", "16", *FLAGS)
    with pair(("--accept-return", "127.0.0.1", *flags), flags) as (prefill, decode), ThreadPoolExecutor(1) as pool:
        ids = prompt(1, TOKENS)
        text = text_of(ask(decode, prompt(2, 50)))
        offer = {"prompt_token_ids": ids, "ticket": TICKET, "control_port": scripted.control_port}
        asked = pool.submit(prefill.post, "/v1/returns", offer)
        scripted.greet()
        scripted.welcome(fingerprint=scripted.hello["fingerprint"])
        scripted.came("Attach")
        scripted.send({"type": "Attached", "stage": 0})
        whole = TOKENS // PAGE * PAGE
        assert asked.result().json() == {"taken": True, "reason": "taken", "tokens": whole}
        assert scripted.reserved()["prompt_tokens"] == whole
        changed = [bytearray(frame) for frame in scripted.kv(0, whole)]
        struct.pack_into("<f", changed[1], 4 * HEAD_DIM, float("nan"))
        metadata = row(TICKET, scripted.reserve["generation"], 0, 3, prompt=whole, cached=whole)
        frames = [metadata, *map(bytes, changed)]
        assert scripted.deliver(0, 0, whole, last=True, frames=frames)["type"] == "Ack"
        scripted.finish()
        wait_until(lambda: prefill.total("headrace_kv_returned_tokens_total") == whole, 10, "it has come")
        assert failed(ask(decode, ids))
        answer = ask(decode, ids)
        assert answer.status_code == 200, "the pages have left the cache"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert text_of(ask(decode, prompt(2, 50))) == text
        for server in (prefill, decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 10, "pages back")
