"""Models for servers under test, each with an oracle: what comes after a prompt, computed another way.

Most tests are about everything but the model. They run with the stub, which loads at once and whose tokens show
every wrong page (engine/stub/runner.py), and with SmolLM2 in the full run.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import msgspec
import pytest

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.load_plan import plan_rank
from headrace.engine.stub.runner import StubRunner
from headrace.text.detokenizer import TextStream
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.e2e import gold
from tests.e2e.harness import Server

NAME = "tested"
GREEDY = SamplingParams(temperature=0.0)
SIZES = "stub:layers=4,vocab=1000,max_len=8192"
SHARDED_SIZES = f"{SIZES},hidden=128,heads=8,kv_heads=2"


class StubOracle:
    """One runner, one request at a time, in one page, without the time that it takes."""

    def __init__(self, sizes: str, room: int) -> None:
        """room: positions of the longest prompt with its tokens."""
        settings = ModelConfig(model=f"{sizes},us_per_token=0", dtype="float32", device="cpu", max_model_len=room)
        self._runner = StubRunner(plan_rank(settings, EngineConfig(page_size=room, kv_pages=1)))
        self._tokenizer = load_tokenizer(sizes, "")

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def greedy(self, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The next tokens."""
        found: list[int] = []
        while len(found) < tokens:
            start, ids = (len(prompt) + len(found) - 1, found[-1:]) if found else (0, list(prompt))
            row = PlanRow(0, start, len(ids), pack([0]), pack(ids), sample=GREEDY, slot=0)
            found.append(self._runner.execute([row])[0][0].token)
        self._runner.release(0)
        return tuple(found)

    def greedy_text(self, prompt: Sequence[int], tokens: int) -> str:
        return spoken(self._tokenizer, prompt, self.greedy(prompt, tokens))


def spoken(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Tokens after a prompt as text."""
    stream = TextStream(tokenizer, prompt)
    return "".join(stream.push(token) for token in tokens) + stream.flush()


class Model(msgspec.Struct, frozen=True):
    """flags: of a server with this model under NAME. story: a long prompt's ids. greedy, greedy_text: what a model says
    after a prompt, so many tokens long."""

    flags: tuple[str, ...]
    story: Callable[[], tuple[int, ...]]
    greedy: Callable[[tuple[int, ...], int], tuple[int, ...]]
    greedy_text: Callable[[tuple[int, ...], int], str]

    def check(self, server: Server, lengths: Sequence[int], tokens: int) -> None:
        """Prompts of these lengths, all at once, and their texts."""
        prompts = [self.story()[:length] for length in lengths]

        def text(prompt: tuple[int, ...]) -> str:
            body = {"model": NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
            answer = server.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            texts = list(pool.map(text, prompts))
        assert texts == [self.greedy_text(prompt, tokens) for prompt in prompts]


@cache
def _oracle(sizes: str = SIZES) -> StubOracle:
    return StubOracle(sizes, 8192)


@cache
def _story() -> tuple[int, ...]:
    draw = random.Random(1)
    return tuple(draw.randrange(_oracle().vocab_size) for _ in range(8000))


def stub(us_per_token: int, sizes: str = SIZES) -> Model:
    """The stub. us_per_token: how long it takes, for tests that have to be quicker than the prompt."""
    return Model(
        ("--model", f"{sizes},us_per_token={us_per_token}", "--served-model-name", NAME, "--dtype", "float32"),
        _story,
        lambda prompt, tokens: _oracle(sizes).greedy(prompt, tokens),
        lambda prompt, tokens: _oracle(sizes).greedy_text(prompt, tokens),
    )


def sharded_stub(us_per_token: int) -> Model:
    """The stub with 8 query heads and 2 KV heads, to be split over shards."""
    return stub(us_per_token, SHARDED_SIZES)


SMOLLM2 = Model(("--served-model-name", NAME, "--dtype", "float32"), gold.story_ids, gold.greedy, gold.greedy_text)


def both(us_per_token: int) -> list[object]:
    """Parameters: the stub always, SmolLM2 in the full run."""
    return [
        pytest.param(stub(us_per_token), id="stub"),
        pytest.param(SMOLLM2, id="smollm2", marks=pytest.mark.full),
    ]
