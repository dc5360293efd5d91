"""Models of the zoo on a pair of servers: two prefill stages hand over to a decode server, which says what transformers
says."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.engine.model.stub import stub_tokenizer
from tests.e2e.expert_models import TOKENS, VOCABULARY, clear_texts
from tests.e2e.harness import pair, wait_until
from tests.e2e.texts import check_together
from tests.models.architectures import ARCHITECTURES
from tests.models.zoo import make_model

LENGTHS = (5, 50, 130)
FLAGS = ("--dtype", "float32", "--kv-pages", "128", "--chunk-tokens", "32", "--max-model-len", "512", "--threads", "1")
FREED = ("gemma2", "gemma3", "mimo-v2-flash", "gemma4")  # windows beside layers of other shapes, and in one stage


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if not each.refused])
def test_texts_behind_a_handoff_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, LENGTHS)


@pytest.mark.parametrize("name", ["gpt-oss", *(pytest.param(name, marks=pytest.mark.full) for name in FREED)])
def test_texts_behind_a_handoff_of_windows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts of one and of several laps around a ring of 128 places; the rest of a window is not handed over."""
    check(name, tmp_path, (5, 130, 400), "--windows", "free")


def check(name: str, folder: Path, lengths: Sequence[int], *more: str) -> None:
    architecture = ARCHITECTURES[name]
    text = architecture.fields.get("text_config", architecture.fields)
    sizes = {name: VOCABULARY for name in ("vocab_size", "vocab_size_per_layer_input") if name in text}
    model = make_model(architecture, **sizes, eos_token_id=None, bos_token_id=None)
    model.save_pretrained(folder)
    stub_tokenizer(f"stub:vocab={VOCABULARY}").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    rotated = architecture.fields.get("original_max_position_embeddings", 0)  # shorter ones otherwise by transformers
    texts = clear_texts(folder, [length for length in lengths if length > rotated], model)
    flags = ("--model", str(folder), "--decoder", "library", *FLAGS, *more)
    with pair((*flags, "--pp", "2" if architecture.stages else "1"), flags) as (prefill, decode):
        info = prefill.get("/server_info").json()
        assert (info["decoder"], type(info["same_bits"])) == ("library", bool)
        check_together(decode, texts, TOKENS)
        check_together(decode, texts, TOKENS)  # from warm prefix caches
        wait_until(lambda: prefill.total("headrace_bytes_sent_total") > 0, 5, "the stages' counters, once a second")
