"""bfloat16: the same tokens as vLLM's own, wherever vLLM itself is sure of them: make test-vllm.

Both sides compute prompts, with kernels that add up in another order and round to 8 bits of mantissa. So their KV
differs in the last bits, and so do logits: those from 16 to 32 have steps of an eighth. Where the two best tokens are
as near as some such steps, either is right, and after such a place the texts are continuations of different prompts.
Up to there they have to be equal. KV at wrong places or of the wrong kind does not pass: it moves logits by more.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

import pytest

from benchmarks.vllm_server import Vllm
from tests.e2e.harness import serving
from tests.gateway.vllm_nixl.fleet import PREFILL, Example, Site, gateway_of
from tests.gateway.vllm_nixl.texts import COMPLETION, GREEDY, loaded
from tests.integrations.vllm.sides import loads, prompt

pytestmark = pytest.mark.vllm

SURE = 0.5  # between the logarithms of the best and the second best token's probability: four steps of the logits
PLACES = range(0, 1500, 125)  # in the text, where prompts begin that are tried
LEAST = 3  # tokens that it has to be sure of


class Step(NamedTuple):
    token: str
    margin: float


def steps(answer: dict[str, object]) -> list[Step]:
    """The tokens of a completion with two logprobs each."""
    found = answer["choices"][0]["logprobs"]  # type: ignore[index]
    margins = [sorted(each.values())[-1] - sorted(each.values())[-2] for each in found["top_logprobs"]]
    return [Step(*each) for each in zip(found["tokens"], margins, strict=True)]


@pytest.fixture(scope="module")
def site(bfloat16: Vllm) -> Iterator[Site]:
    with serving(*PREFILL, "--dtype", "bfloat16") as server, gateway_of((bfloat16,), (server,)) as made:
        yield made


@pytest.mark.parametrize("length", [1, 7, 127, 128, 129, 256, 300, 700, 2000])
def test_tokens_that_vllm_is_sure_of(site: Site, length: int) -> None:
    """Of the first of some prompts for which it is sure of enough."""
    example, extra = Example(site), {**GREEDY, "logprobs": 2}
    for at in PLACES:
        ids = prompt(length, at=at)
        alone = steps(site.decode.complete(ids, logprobs=2).json())
        sure = list(takewhile(lambda step: step.margin >= SURE, alone))
        if len(sure) >= LEAST:
            break
    else:
        raise AssertionError("no prompt that vLLM is sure of")
    with loads(site.decode, loaded(length)):
        answer = example.post(COMPLETION, {**extra, "prompt": ids, "cache_salt": f"loaded-{length}"})
    got = steps(answer.json())
    equal = sum(1 for _ in takewhile(lambda pair: pair[0].token == pair[1].token, zip(got, alone, strict=True)))
    print(f"{length} tokens: {equal} of {len(alone)} are equal; vLLM is sure of {len(sure)}")
    assert equal >= len(sure)
