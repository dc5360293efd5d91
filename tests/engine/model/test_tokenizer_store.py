"""Converted tokenizers against those of transformers, and their cache."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from headrace.core.types.errors import ConfigError
from headrace.engine.model.source import ModelSource, load_spec, resolve_source
from headrace.engine.model.tokenizer_store import TokenizerRecord, convert, load_record
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from tests.engine.models import transformers_tokenizer

TEXTS = (
    "",
    " ",
    "\n",
    "Why is the sky blue?",
    "  two spaces, a tab\tand\r\n\r\nlines  ",
    "1234567890 3.14 1,000,000",
    "naïve Grüße, 日本語のテキスト, Привет, مرحبا, नमस्ते",
    "e\N{COMBINING ACUTE ACCENT} and \N{LATIN SMALL LETTER E WITH ACUTE}",
    "🙂👩‍👩‍👧‍👦 flags 🇩🇪",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <s> </s> <unk>",
    "def f(x):\n    return {'a': x[0]}\n",
    "I'm you're they'll WE'VE",
    "\x00\x01 control \u200b zero width",
    "a" * 300,
)
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What? "}],
    [
        {"role": "user", "content": "<b>\"1\" & '2'</b>\n"},
        {"role": "assistant", "content": "日本"},
        {"role": "user", "content": "<|im_end|>", "name": "Ann"},
    ],
    [{"role": "assistant", "content": ""}, {"role": "tool", "content": "{}"}],
)
TEMPLATES = {
    "loop": "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}{{ eos_token }}",
    "controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "json": "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ messages[0] | tojson(ensure_ascii=True) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "blocks": "{% if add_generation_prompt %}\n  yes\n{% endif %}\n  {%- if tools is not none %} tools {% endif %}",
    "macro": "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "date": "{{ strftime_now('%Y-%m') }} {{ bos_token }}{{ unk_token }} {{ missing }} {{ documents is none }}",
    "items": "{% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}{{ dict(a=1) }}",
}


def byte_level() -> Any:
    """A byte-level BPE with a post-processor, as of Llama 3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate([*alphabet, "he", "Ġt", "Ġth"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "t"), ("Ġt", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|im_end|>", special=True)])
    begin = backend.token_to_id("<|begin|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B:1", special_tokens=[("<|begin|>", begin)]
    )
    backend.enable_truncation(20)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|im_end|>")


def metaspace() -> Any:
    """As of Llama 2: byte tokens for characters outside the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁t", "h", "e", "th", "▁the"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, "t", "a", "s"]))}
    return LlamaTokenizer(vocab=vocab, merges=[("▁", "t"), ("t", "h")], add_bos_token=True)


def qwen() -> Any:
    """As of Qwen: normalised, digits one by one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate([*alphabet, "he", "12", "<|endoftext|>"])}
    return Qwen2Tokenizer(vocab=vocab, merges=[("h", "e"), ("1", "2")])


MAKERS = {"byte-level": byte_level, "metaspace": metaspace, "qwen": qwen}


@pytest.fixture(scope="session", params=["smollm2", *MAKERS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer, and that of transformers, from the same files."""
    model = request.param
    if model in MAKERS:
        folder = tmp_path_factory.mktemp(model)
        made = MAKERS[model]()
        made.chat_template = TEMPLATES["loop"]
        made.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
        model = str(folder)
    return made_of(convert(resolve_source(model))), transformers_tokenizer(model)


def made_of(record: TokenizerRecord) -> Tokenizer:
    template = ChatTemplate(record.chat_template, record.special_tokens) if record.chat_template else None
    return Tokenizer(tokenizers.Tokenizer.from_str(record.backend), record.eos_ids, template)


def equal(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_ids_that_transformers_makes(pair: tuple[Tokenizer, Any], text: str) -> None:
    equal(*pair, text)


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_any_text_becomes_the_ids_that_transformers_makes(pair: tuple[Tokenizer, Any], text: str) -> None:
    equal(*pair, text)


@pytest.mark.parametrize("messages", CHATS)
def test_conversations_become_the_ids_that_transformers_makes(
    pair: tuple[Tokenizer, Any], messages: list[dict[str, Any]]
) -> None:
    ours, theirs = pair
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(messages) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_templates_render_as_in_transformers(name: str, messages: list[dict[str, Any]]) -> None:
    theirs = byte_level()
    expected = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(TEMPLATES[name], theirs.special_tokens_map).render(messages) == expected


def test_every_token_and_the_ends_are_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids[0] == theirs.eos_token_id
    word = theirs.convert_tokens_to_ids("h")
    for token in range(len(theirs)):
        assert ours.decode([token], skip_special=False) == theirs.decode([token])
        assert "h" + ours.piece(token) == theirs.decode([word, token])


def test_the_bundled_model_ends_where_its_file_says() -> None:
    source = resolve_source("smollm2")
    made = made_of(convert(source))
    assert made.eos_ids == (2,)
    assert load_spec(source).vocab_size == made.vocab_size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with tokenizer files only."""
    made = tmp_path / "model"
    byte_level().save_pretrained(made)
    (made / "config.json").write_text("{}")
    return made


def test_a_tokenizer_is_converted_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, source = str(tmp_path / "cache"), resolve_source(str(folder))
    first = load_record(source, cache)
    assert first == convert(source)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # another conversion fails
    assert load_record(source, cache) == first
    (record,) = (tmp_path / "cache").rglob("*.msgpack")
    whole = record.read_bytes()
    place = whole.index(b'"model"')
    for damaged in (whole[:100], b"", whole[:place] + b"(" + whole[place + 1 :], whole[:place] + b"@" + whole[place:]):
        record.write_bytes(damaged)
        with pytest.raises(FileNotFoundError):  # a damaged file would be replaced
            load_record(source, cache)
    record.write_bytes(whole)
    assert load_record(source, cache) == first
    later = (folder / "tokenizer.json").stat().st_mtime_ns + 1
    os.utime(folder / "tokenizer.json", ns=(later, later))
    with pytest.raises(FileNotFoundError):  # and so would the file of a model that has changed
        load_record(source, cache)


def test_without_a_writable_cache_a_tokenizer_is_converted_at_every_start(folder: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert load_record(resolve_source(str(folder)), str(blocked)) == convert(resolve_source(str(folder)))
    assert blocked.read_text() == "not a folder"


def test_models_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    source = ModelSource("hf", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"has no tokenizer; expected one of tokenizer\.json"):
        load_record(source, "")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        load_record(source, "")  # what the child process says


def test_a_tokenizer_that_cannot_encode_every_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="it cannot encode every text: WordLevel error"):
        convert(ModelSource("hf", tmp_path))


def with_code(folder: Path) -> Path:
    """A model folder whose tokenizer is a class of its own; the file that is written when that runs."""
    mark = folder / "executed"
    classes = {"AutoTokenizer": ["code.Own", "code.Own"], "AutoConfig": "code.Config"}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": classes}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": classes}))
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w')\nOwn = Config = object\n")
    return mark


def test_code_of_a_model_folder_is_not_run_and_nobody_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = with_code(folder)
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    program = f"""
from headrace.core.types.errors import ConfigError
from headrace.engine.model.source import resolve_source
from headrace.engine.model.tokenizer_store import load_record
try:
    load_record(resolve_source({str(folder)!r}), "")
except ConfigError as error:
    print(error)
"""
    child = subprocess.run([sys.executable, "-c", program], input="y\n" * 9, capture_output=True, text=True, check=True)
    assert "it needs code of the model folder (auto_map), which is never run" in child.stdout
    assert "y/N" not in child.stdout + child.stderr
    assert not mark.exists()
    with pytest.raises(ConfigError, match="which is never run"):
        convert(resolve_source(str(folder)))


def test_code_that_is_not_needed_is_no_hindrance(folder: Path) -> None:
    """Models of known families often carry a copy of their class."""
    mark = with_code(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert convert(resolve_source(str(folder))).backend
    assert not mark.exists()


def test_a_folder_with_a_sentencepiece_model_alone_says_what_to_install(tmp_path: Path) -> None:
    if find_spec("sentencepiece") is not None:
        pytest.skip("sentencepiece is installed")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    with pytest.raises(ConfigError, match=r"its only tokenizer is tokenizer\.model, .*: pip install sentencepiece"):
        convert(resolve_source(str(tmp_path)))


def test_the_template_of_a_processor_is_read_where_there_is_no_other(folder: Path) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATES["loop"]}))
    assert convert(resolve_source(str(folder))).chat_template == TEMPLATES["loop"]
    (folder / "chat_template.jinja").write_text(TEMPLATES["json"])
    assert convert(resolve_source(str(folder))).chat_template == TEMPLATES["json"]
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": 5}')
    with pytest.raises(ConfigError, match=r"chat_template\.json: 'chat_template' has to be a text, got 5"):
        convert(resolve_source(str(folder)))


def test_neither_front_end_nor_scheduler_loads_torch_or_transformers() -> None:
    """The imports of both, and all that a front end does before it serves, except the conversion in a child."""
    program = """
import os, sys
import headrace.cli.commands
import headrace.server.launch.frontend_process, headrace.server.launch.serve, headrace.server.launch.scheduler_process
from headrace.server.config.load import load
from headrace.server.config.resolve import resolve
from headrace.text.tokenizer import load_tokenizer
config = resolve(load({"model": "smollm2", "device": "cpu"}, os.environ)).config
load_tokenizer(config.model.model, config.server.cache_dir).warm_up()
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (child.stdout, child.returncode) == ("[]\n", 0), child.stderr
