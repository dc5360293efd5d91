"""The tokenizer: stop ids, bytes of tokens, chat templates, and a real model."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from headrace.core.types.errors import TOO_LONG, ConfigError, HeadraceError
from headrace.engine.model.stub import stub_tokenizer
from headrace.server.config.load import load
from headrace.text.async_tokenizer import LONG, AsyncTokenizer
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import MAX_STOP_IDS, SHORT_TEXT_BYTES, Tokenizer, load_tokenizer


def test_stop_ids_are_the_tokens_that_contain_the_string(tokenizer: Tokenizer) -> None:
    pieces = {tokenizer.piece(token) for token in tokenizer.stop_ids(["\n\n"])}
    assert pieces == {"\n\n", ".\n\n"}
    assert {tokenizer.piece(token) for token in tokenizer.stop_ids(["ell"])} == {"hell", "hello"}
    assert tokenizer.stop_ids(["not in any token"]) == ()
    assert tokenizer.stop_ids(["<eos>"]) == tokenizer.eos_ids


def test_every_stop_id_contains_the_string_by_brute_force(tokenizer: Tokenizer) -> None:
    for stop in ("l", "o", " w", "\n"):
        expected = [token for token in range(tokenizer.vocab_size) if stop in tokenizer.piece(token)]
        assert list(tokenizer.stop_ids([stop])) == expected
        assert len(expected) <= MAX_STOP_IDS


def test_bytes_of_tokens_join_to_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "hello wörld 🙂\n\n"
    assert b"".join(tokenizer.piece_bytes(token) for token in tokenizer.encode(text)) == text.encode()


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.piece(-1) == tokenizer.piece(tokenizer.vocab_size) == ""


def test_chat_goes_through_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids) == "<|user|>hello\n<|assistant|>"


def test_a_chat_that_the_template_refuses_is_a_client_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(HeadraceError, match="nobody cannot speak") as caught:
        tokenizer.encode_chat([{"role": "nobody", "content": "hello"}])
    assert (caught.value.info.status, caught.value.info.field) == (400, "messages")


def test_many_threads_may_encode_at_once(tokenizer: Tokenizer) -> None:
    async def main() -> list[list[int]]:
        service = AsyncTokenizer(tokenizer)
        try:
            return await asyncio.gather(*(service.encode(f"hello world {index}") for index in range(50)))
        finally:
            service.close()

    assert asyncio.run(main()) == [tokenizer.encode(f"hello world {index}") for index in range(50)]


def test_the_bundled_model_has_its_tokenizer_and_template() -> None:
    real = load_tokenizer("smollm2", load({}, os.environ).server.cache_dir)
    text = "Why is the sky blue? 日本語 🙂\n\nBecause"
    assert real.decode(real.encode(text)) == text
    assert real.decode(real.encode_chat([{"role": "user", "content": "hi"}])).endswith("assistant\n")
    assert real.piece(real.eos_ids[0]).startswith("<|")
    assert all("\n\n" in real.piece(token) for token in real.stop_ids(["\n\n"]))
    assert real.stop_ids(["e"]) == (), "too many tokens contain an e: it is looked for in the text"


def test_a_file_takes_the_place_of_the_models_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}{{ tools | tojson if tools else '!' }}")
    made = load_tokenizer("stub", "", str(file))
    chat = [{"role": "user", "content": "hi"}]
    assert made.decode(made.encode_chat(chat)) == "hi!"
    assert made.decode(made.encode_chat(chat, tools=[{"a": 1}])) == 'hi[{"a": 1}]'
    for text, words in (("{% if", "is no chat template"), (None, "cannot be read: No such file")):
        file.write_text(text) if text else file.unlink()
        with pytest.raises(ConfigError, match=words):
            load_tokenizer("stub", "", str(file))


def test_conversations_with_tools_have_a_template_of_their_own_if_there_is_one() -> None:
    plain, with_tools = ChatTemplate("{{ messages[0].content }}", {}), ChatTemplate("{{ tools[0].a }}", {})
    made = Tokenizer(stub_tokenizer("stub"), (), plain, with_tools)
    chat = [{"role": "user", "content": "hi"}]
    assert (made.decode(made.encode_chat(chat)), made.decode(made.encode_chat(chat, tools=[{"a": 1}]))) == ("hi", "1")
    assert with_tools.takes_tools
    assert not plain.takes_tools


def test_some_special_tokens_can_be_shown() -> None:
    backend = stub_tokenizer("stub:vocab=258")
    backend.add_special_tokens(["[A]", "[B]"])
    made = Tokenizer(backend)
    ids = [*made.encode("x"), made.added_id("[A]") or 0, made.added_id("[B]") or 0, *made.encode("y")]
    assert made.decode(ids) == made.showing(()).decode(ids) == "xy"
    assert made.showing(ids[1:2]).decode(ids) == "x[A]y"


def test_a_stub_has_a_tokenizer_of_bytes() -> None:
    made = load_tokenizer("stub:vocab=300", "")
    assert made.encode("é\n") == list("é\n".encode())
    assert (made.vocab_size, made.eos_ids) == (300, (256,))
    assert made.decode([*b"a", 257, 299]) == "a w257 w299"
    assert [made.piece(token) for token in (97, 256, 257)] == ["a", "<end>", " w257"]
    assert made.piece_bytes(0xC3) == b"\xc3"
    assert made.decode(made.encode_chat([{"role": "user", "content": "hi"}])) == "user: hi\nassistant: "


class Steps(threading.Thread):
    """Counts the steps that it gets to take beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.001):
            self.taken += 1

    def __enter__(self) -> "Steps":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def test_other_threads_go_on_while_a_long_text_is_encoded_or_decoded(tokenizer: Tokenizer) -> None:
    text = "hello world " * 50_000
    with Steps() as steps:
        before = steps.taken
        ids = tokenizer.encode(text)
        between = steps.taken
        assert tokenizer.decode_long(ids) == text
        after = steps.taken
    assert between - before > 10, "a thread that waits for the GIL all the time takes one at the end"
    assert after - between > 10


def refused(tokenizer: Tokenizer, text: str, limit: int) -> str:
    with pytest.raises(HeadraceError) as caught:
        tokenizer.encode(text, limit, "text[3]")
    info = caught.value.info
    assert (info.status, info.code, info.field) == (400, TOO_LONG, "text[3]")
    return info.message


def test_a_text_that_cannot_fit_is_not_tokenized(tokenizer: Tokenizer) -> None:
    longest = len("Ġworld")
    limit = 100
    assert len(tokenizer.encode(" world" * (limit - 1), limit)) == limit - 1
    assert f"{limit} tokens; with one generated token the limit is {limit}" in refused(tokenizer, "z" * limit, limit)
    text = "z" * longest * limit
    assert f"{len(text)} bytes, which are at least {limit} tokens" in refused(tokenizer, text, limit)
    tokenizer.encode("warm up", limit)
    backend, tokenizer._backend = tokenizer._backend, RustTokenizer(models.BPE())  # it would find no token
    try:
        assert refused(tokenizer, text, limit)
        assert tokenizer.encode(text[:-longest], limit) == []
    finally:
        tokenizer._backend = backend


def test_no_text_is_tokenized_that_is_far_too_long_where_there_is_no_bound() -> None:
    backend = RustTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode(" " * SHORT_TEXT_BYTES, 10) == []
    assert f"no text of more than {SHORT_TEXT_BYTES} is" in refused(tokenizer, " " * (SHORT_TEXT_BYTES + 1), 10)
    assert f"no text of more than {16 << 17} is" in refused(tokenizer, " " * (3 << 20), 1 << 17)
    assert tokenizer.encode(" " * (3 << 20)) == [], "without a limit there is none"


def test_short_texts_do_not_wait_for_long_ones(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        service = AsyncTokenizer(tokenizer)
        try:
            long = [asyncio.create_task(service.encode("hello world " * LONG)) for _ in range(4)]
            await asyncio.sleep(0)
            assert await service.encode("hello") == tokenizer.encode("hello")
            assert not long[-1].done()
            await asyncio.gather(*long)
        finally:
            service.close()

    asyncio.run(main())
