"""Gold: Gemma 3 270M from its published GGUF (Q4_K_M), beside transformers' own reading of the file, in float32."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from transformers.integrations.gguf.reader import read_gguf_metadata

from headrace.core.types.requests.request import SamplingParams
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.harness import Server, pair, wait_until
from tests.e2e.models import spoken
from tests.e2e.texts import check_together, text_of
from tests.engine.models import Prompt, make_runner, transformers_tokenizer
from tests.models.gemma3 import by_transformers, gguf_file

pytestmark = pytest.mark.full
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Einige Wörter auf Deutsch, 日本語のテキスト, العربية, 🙂🤗, ein\tTabulator;  zwei   oder    mehr.\n\n\nEnde",
    "In 1969, 12345 men & women <start_of_turn>user\nwent — 'twice' — to the café… ½ \u0001\ufffd \u200b ǆ",
    " leading space", "", "  ", "\n", "<0x0A>", "[multimodal]x",
)  # fmt: skip
STORY = (
    "The water of the headrace turns the wheel, and the wheel turns the stone. The miller, who sleeps above, wakes "
    "when the stone stops, so he has a bell that rings when the hopper is empty. "
)
WINDOW = 512  # of the model's sliding layers
TOKENS = 24
CLEAR = 2e-2  # by which the best logit is above the second where texts are compared
SEEN = 200  # likeliest tokens whose log-probabilities are compared


class Vocabulary(NamedTuple):
    """What a file says of its tokens."""

    ids: dict[str, int]
    scores: list[float]
    whole: list[str]
    """Tokens that are found in a text before anything else, longest first."""


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    metadata, _ = read_gguf_metadata(str(gguf_file()), ("tokenizer.ggml.tokens",))
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)]  # control, user-defined
    ids = {token: number for number, token in enumerate(tokens)}
    return Vocabulary(ids, metadata["tokenizer.ggml.scores"], sorted(whole, key=len, reverse=True))


def merged(text: str, vocabulary: Vocabulary) -> list[int]:
    """SentencePiece's BPE, naively: of all neighbours that are a token together, the best ones are joined first."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (vocabulary.scores[vocabulary.ids[joined]], -at)
            for at in range(len(pieces) - 1)
            if (joined := pieces[at] + pieces[at + 1]) in vocabulary.ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[int] = []
    for piece in pieces:
        known = vocabulary.ids.get(piece)
        found += [vocabulary.ids[f"<0x{byte:02X}>"] for byte in piece.encode()] if known is None else [known]
    return found


def ids_of(text: str, vocabulary: Vocabulary) -> list[int]:
    """Tokens of a text by the file's vocabulary alone."""
    for token in vocabulary.whole:
        if token in text:
            before, after = text.split(token, 1)
            return [*ids_of(before, vocabulary), vocabulary.ids[token], *ids_of(after, vocabulary)]
    return merged(text, vocabulary)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(gguf_file()), "")


@pytest.fixture(scope="module")
def of_transformers() -> Any:
    return transformers_tokenizer(str(gguf_file()))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_sentencepiece(
    text: str, tokenizer: Tokenizer, of_transformers: Any, vocabulary: Vocabulary
) -> None:
    expected = [2, *ids_of(text, vocabulary)]
    assert of_transformers(text)["input_ids"] == expected
    assert tokenizer.encode(text) == expected


def test_logprobs_beyond_the_window_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    """After a prompt in chunks beside another request, whose layers have left its beginning behind."""
    tokens = tokenizer.encode(STORY * 14)
    assert len(tokens) > WINDOW + 64
    with torch.inference_mode():
        logits = by_transformers()(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1]
    expected = torch.log_softmax(logits.float(), -1)
    runner = make_runner(gguf_file(), kv_pages=96, max_model_len=1024)
    pages = -(-len(tokens) // 16)
    own = Prompt(1, tokens, list(range(pages, 0, -1)), 16)
    other = Prompt(2, tokenizer.encode("In 1969 " * 40), list(range(pages + 1, pages + 20)), 16)
    seen = SamplingParams(temperature=0.0, logprobs=SEEN)
    for start in range(0, len(tokens), 200):
        count = min(200, len(tokens) - start)
        rows = [own.row(start, count, sample=seen if start + count == len(tokens) else None)]
        samples = runner.execute([other.row(start // 5, 40), *rows] if start < 400 else rows)[0]
    sampled = samples[-1]
    assert sampled.logprob is not None
    found = torch.tensor(sampled.logprob.top_logprobs)
    torch.testing.assert_close(found, expected[list(sampled.logprob.top_ids)], atol=2e-3, rtol=2e-3)
    assert sampled.token == int(expected.argmax())


def clear_greedy(prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers, as far as no rounding can change them."""
    model, found = by_transformers(), list[int]()
    for _ in range(TOKENS):
        with torch.inference_mode():
            best = model(torch.tensor([[*prompt, *found]]), logits_to_keep=1).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < CLEAR:
            break
        found.append(int(best.indices[0]))
    return found


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    flags = ("--model", str(gguf_file().parent), "--dtype", "float32", "--kv-pages", "128", "--max-model-len", "1024")
    with pair((*flags, "--pp", "2", "--chunk-tokens", "64"), flags) as both:
        yield both


def test_texts_behind_a_handoff_are_those_of_transformers(servers: tuple[Server, Server], tokenizer: Tokenizer) -> None:
    prefill, decode = servers
    assert prefill.get("/server_info").json()["decoder"] == "library"
    prompts = [tokenizer.encode(text) for text in (*TEXTS[:3], STORY * 4)]
    for prompt in prompts:
        tokens = clear_greedy(prompt)
        assert len(tokens) > 4
        check_together(decode, {tuple(prompt): spoken(tokenizer, prompt, tokens)}, len(tokens))
    wait_until(lambda: prefill.total("headrace_bytes_sent_total") > 0, 5, "the stages' counters, once a second")


def test_a_text_is_tokenized_and_a_chat_needs_a_template(servers: tuple[Server, Server]) -> None:
    """The base model's file has no chat template; one that is given is used."""
    _, decode = servers
    body: dict[str, Any] = {"prompt": TEXTS[0], "max_tokens": 8, "temperature": 0}
    assert text_of(decode.post("/v1/completions", body)).startswith(" the capital of the country of France")
    answer = decode.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400
    assert "no chat template" in answer.text
