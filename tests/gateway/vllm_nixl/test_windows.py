"""Models with windows behind the gateway: vLLM loads their KV if it keeps all of their layers in one group: make
test-vllm.

Small random models, and prompts after which no rounding changes a token: they are vLLM's own, and transformers'.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.e2e.expert_models import TOKENS, clear_tokens
from tests.e2e.harness import Server, serving
from tests.gateway.vllm_nixl.fleet import Example, Site, gateway_flags, gateway_of, refused, stock
from tests.gateway.vllm_nixl.texts import COMPLETION, GREEDY, fresh, loaded
from tests.integrations.vllm.sides import loads
from tests.models.zoo import save_for_servers

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("others_stopped")]

LONGEST = 1024
LENGTHS = (5, 63, 200, 700)  # within a window of 24 tokens and beyond it; of one block and of several
SIZES: dict[str, dict[str, Any]] = {"gemma3": {}, "gpt-oss": {"head_dim": 64}}  # vLLM has kernels from 32 on
LENGTH_FLAG = ("--max-model-len", str(LONGEST))
ONE_GROUP = "--disable-hybrid-kv-cache-manager"


class Windowed(NamedTuple):
    """A model with windows."""

    folder: Path
    tokens: dict[tuple[int, ...], list[int]]
    """What transformers says after prompts of LENGTHS."""
    prefill: Server


@pytest.fixture(scope="module", params=SIZES)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windowed]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_for_servers(request.param, folder, max_position_embeddings=LONGEST, **SIZES[request.param])
    with serving("--role", "prefill", "--model", str(folder), *LENGTH_FLAG, "--threads", "1") as prefill:
        yield Windowed(folder, clear_tokens(model, LENGTHS), prefill)


@pytest.fixture(scope="module")
def site(windowed: Windowed) -> Iterator[Site]:
    """Between them a vLLM with one group of blocks."""
    with closing(stock(windowed.folder, "float32", *LENGTH_FLAG, ONE_GROUP)) as engine:
        engine.wait_ready()
        with gateway_of((engine,), (windowed.prefill,)) as made:
            yield made


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens(site: Site, windowed: Windowed, length: int) -> None:
    """Not texts: such models say no valid UTF-8."""
    prompt, said = next((prompt, said) for prompt, said in windowed.tokens.items() if len(prompt) == length)
    body = {**GREEDY, "prompt": list(prompt), "max_tokens": TOKENS, "logprobs": 1, "return_tokens_as_token_ids": True}
    expected = [f"token_id:{token}" for token in said]
    assert tokens_of(site.decode.client.post(COMPLETION, json=fresh(body))) == expected
    with loads(site.decode, loaded(length)):
        assert tokens_of(Example(site).post(COMPLETION, fresh(body))) == expected


def tokens_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    found: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
    return found


def test_several_groups_are_refused_with_the_flag_that_makes_one(windowed: Windowed) -> None:
    with closing(stock(windowed.folder, "float32", *LENGTH_FLAG)) as engine:
        engine.wait_ready()
        assert ONE_GROUP in refused(*gateway_flags((engine,), (windowed.prefill,)))
