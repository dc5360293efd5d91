"""Servers on one GPU, as a part of first_gpu_minutes: a prefill and a decode server, and one with two stages."""

import json
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from benchmarks.handoff import through_peer_ms
from benchmarks.report import prompt
from benchmarks.server import serving
from benchmarks.shapes import LLAMA_8B
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.model.stub import stub_tokenizer
from headrace.engine.model.tensor_names import model_tensors
from headrace.server.launch.local_server import LocalServer

if TYPE_CHECKING:
    from benchmarks.first_gpu_minutes import Minutes

VOCABULARY = 1000
SMALL = LLAMA_8B | {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
}  # fmt: skip
TINY = SMALL | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
WEIGHTS = 0.1  # their standard deviation: answers to unlike prompts are unlike


def servers(at: "Minutes") -> None:
    """One server, a prefill and a decode server, and a prefill server of two stages before it: texts and first
    tokens."""
    tokens, more = (40, 12) if at.tiny else (2000, 64)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), TINY if at.tiny else SMALL, at.device)
        common = ("--model", folder, "--device", str(at.device), "--dtype", "bfloat16", "--kv-pages", "512")
        with started(common) as (alone, *_):
            expected, taken = answer(alone, tokens, more)
            at.keep(f"one server: first token of {tokens:,} after {taken:,.0f} ms")
        for name, flags in (("prefill and decode", ()), ("two stages and decode", ("--pp", "2"))):
            with started((*common, *flags), common) as (_, decode):
                found, taken = answer(decode, tokens, more)
                same = "the text of one server" if found == expected else "ANOTHER TEXT than one server"
                at.keep(f"{name}: {same}, first token after {taken:,.0f} ms")


@contextmanager
def started(flags: Sequence[str], decode: Sequence[str] = ()) -> Iterator[list[LocalServer]]:
    """A server with these flags; with those of a decode server, a prefill server before it. Raises ServerFailed."""
    with ExitStack() as stack:
        role = ("--role", "prefill") if decode else ()
        found = [stack.enter_context(serving(*role, *flags, status="starting a server"))]
        if decode:
            more = ("--role", "decode", "--prefill", found[0].url, *decode)
            found.append(stack.enter_context(serving(*more, status="starting a decode server")))
        yield found


def answer(server: LocalServer, tokens: int, more: int) -> tuple[str, float]:
    """The text behind a prompt, and milliseconds to the first token of another one as long, when all is warm."""
    ids = [each % VOCABULARY for each in prompt(tokens, 1)]
    body = {"prompt": ids, "max_tokens": more, "temperature": 0, "ignore_eos": True}
    response = server.request("POST", "/v1/completions", body, timeout_s=120)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"]), through_peer_ms(server, [*ids[1:], ids[0]])


def write_model(folder: Path, config: dict[str, Any], device: torch.device) -> None:
    """A model of random weights with a tokenizer of bytes."""
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, shape in model_tensors(load_spec(resolve_source(str(folder)))).items():
        random = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        made = torch.randn(shape, generator=random, device=device) * WEIGHTS if len(shape) > 1 else torch.ones(shape)
        tensors[name] = made.bfloat16().cpu()
    save_file(tensors, folder / "model.safetensors")
    stub_tokenizer(f"stub:vocab={VOCABULARY}").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
