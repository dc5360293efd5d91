"""Servers with a DeepSeek model, whose KV is a latent: texts are those of transformers, however it is served."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import DeepseekV3Config, PreTrainedTokenizerFast

from headrace.integrations.transformers import RemotePrefill
from headrace.text.tokenizer import load_tokenizer
from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.models import spoken
from tests.e2e.texts import check_alone, check_together
from tests.engine.models import CONFIGS, Saved, save_model

VOCABULARY = 256
TOKENS = 8
LENGTHS = (1, 15, 33, 64, 130, 200)
FLAGS = ("--kv-pages", "256", "--max-model-len", "512", "--threads", "1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model with one token per byte."""
    folder = tmp_path_factory.mktemp("model")
    config = {**CONFIGS["deepseek-v3"].to_dict(), "vocab_size": VOCABULARY, "eos_token_id": None, "bos_token_id": None}
    made = save_model(DeepseekV3Config(**config), folder)
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=rust).save_pretrained(folder)
    return made


def prompt(length: int) -> list[int]:
    return [(position * 37 + position * position) % VOCABULARY for position in range(length)]


def expected(saved: Saved, ids: Sequence[int]) -> list[int]:
    """The next tokens, greedy, from transformers."""
    torch.set_num_threads(1)
    found = saved.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens


def check(server: Server, saved: Saved) -> None:
    """One by one, then all at once."""
    tokenizer = load_tokenizer(str(saved.folder), "")
    prompts = [tuple(prompt(length)) for length in LENGTHS]
    texts = {each: spoken(tokenizer, each, expected(saved, each)) for each in prompts}
    check_alone(server, texts, TOKENS)
    check_together(server, texts, TOKENS)
    wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")


@pytest.mark.full
def test_one_server(saved: Saved) -> None:
    with serving("--model", str(saved.folder), "--role", "colocated", "--chunk-tokens", "48", *FLAGS) as server:
        check(server, saved)
        assert server.total("headrace_cached_tokens_total") > 0, "prompts begin with each other"


@pytest.mark.full
@pytest.mark.parametrize("backends", ["shm,zmq", "zmq"])
def test_prefill_and_decode_with_other_pages_and_stages(saved: Saved, backends: str) -> None:
    flags = ("--model", str(saved.folder), "--transfer-backends", backends, *FLAGS)
    stages = ("2", "1") if backends == "zmq" else ("1", "2")
    with pair(
        (*flags, "--pp", stages[0], "--chunk-tokens", "64"), (*flags, "--pp", stages[1], "--page-size", "64")
    ) as (prefill, decode):
        check(decode, saved)
        sent = f'headrace_bytes_sent_total{{backend="{backends.partition(",")[0]}"}}'
        wait_until(lambda: prefill.metrics()[sent] > 0, 5, "the stages' counters, which come once a second")


@pytest.mark.full
def test_generate_goes_on_from_latents_that_a_server_computed(saved: Saved) -> None:
    """DeepSeek-V3's cache in transformers, whose keys are rotated to halves."""
    with (
        serving("--model", str(saved.folder), "--role", "prefill", *FLAGS) as server,
        RemotePrefill(server.url, saved.model) as remote,
    ):
        for length in (2, 65, 130):
            input_ids = torch.tensor([prompt(length)])
            cache = remote.prefill(input_ids)
            assert cache.get_seq_length() == length - 1
            found = saved.model.generate(
                input_ids,
                past_key_values=cache,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert found[0, length:].tolist() == expected(saved, prompt(length))
            alone = saved.model(input_ids[:, :-1], use_cache=True).past_key_values
            for layer, (ours, theirs) in enumerate(zip(remote.prefill(input_ids).layers, alone.layers, strict=True)):
                for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4, msg=f"layer {layer}")


@pytest.mark.full
def test_the_model_is_described_at_the_start(saved: Saved, tmp_path: Path) -> None:
    """`headrace check`: bytes of a token are those of its latents."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace.cli.commands",
            "check",
            "--model",
            str(saved.folder),
            "--dtype",
            "float32",
            *FLAGS,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert f"{3 * 48 * 4} bytes per token" in done.stdout, done.stdout + done.stderr
