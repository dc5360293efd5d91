"""Hidden states through real processes: those of every position, in order, whatever chunks, stages and servers."""

import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.packed import pack
from headrace.engine.load_plan import plan_rank
from headrace.engine.stub.runner import StubRunner
from tests.e2e.harness import Server, pages_in_use, pair, wait_until

SIZES = "stub:layers=4,hidden=64,vocab=1000,max_len=1024,us_per_token=0"
FLAGS = ("--model", SIZES, "--kv-pages", "512", "--dtype", "float32")
PROMPTS = [[(7 * index + number) % 250 for index in range(length)] for number, length in enumerate((150, 1, 64, 33))]


def expected(tokens: Sequence[int]) -> list[list[float]]:
    """One runner, in one pass and one page."""
    settings = ModelConfig(model=SIZES, dtype="float32", device="cpu")
    runner = StubRunner(plan_rank(settings, EngineConfig(page_size=1024, kv_pages=1)))
    row = PlanRow(0, 0, len(tokens), pack([0]), pack(tokens), hidden=len(tokens))
    states = runner.execute([row]).hidden[0].states
    found: list[list[float]] = torch.frombuffer(bytearray(states.data), dtype=torch.float32).view(-1, 64).tolist()
    return found


def generated(server: Server, prompts: Any, **fields: Any) -> Any:
    sampling = {"max_new_tokens": 5, "temperature": 0}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_hidden_states": True, **fields}
    answer = server.post("/generate", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(answer: Any, prompt: Sequence[int]) -> None:
    first, *others = answer["meta_info"]["hidden_states"]
    assert len(first) == len(prompt)
    assert [*first, *others] == expected([*prompt, *answer["output_ids"][:-1]])


@pytest.mark.full
def test_a_pair_of_any_shape_delivers_them() -> None:
    """Two stages and chunks of 32 at the prefill server, one stage and other pages at the decode server; prompts that
    the prefix cache has by then, too."""
    with pair(
        (*FLAGS, "--pp", "2", "--chunk-tokens", "32"), (*FLAGS, "--page-size", "4", "--max-hidden-bytes", "128KiB")
    ) as (prefill, decode):
        for prompt in PROMPTS:
            check(generated(decode, prompt), prompt)
        for answer, prompt in zip(generated(decode, PROMPTS), PROMPTS, strict=True):
            check(answer, prompt)
        many = PROMPTS * 4
        with ThreadPoolExecutor(8) as pool:
            for answer, prompt in zip(pool.map(lambda ids: generated(decode, ids), many), many, strict=True):
                check(answer, prompt)
        for wanted, start in (("all", 0), ("last", 149)):
            body = {"prompt_token_ids": PROMPTS[0], "handoff": "none", "hidden_states": wanted, "draft_top_k": 2}
            answer = prefill.post("/v1/prefill", body).json()
            found = answer["hidden_states"]
            assert (found["start"], found["shape"], found["dtype"]) == (start, [150 - start, 64], "float32")
            states = torch.frombuffer(bytearray(base64.b64decode(found["data"])), dtype=torch.float32)
            assert states.view(-1, 64).tolist() == expected(PROMPTS[0])[start:]
            assert answer["draft"]["top_ids"][0] == answer["first_token"]["id"]
            assert (answer["usage"]["cached_tokens"] > 0) == (wanted == "last")
        too_many = {"input_ids": many, "return_hidden_states": True}
        refused = decode.post("/generate", too_many)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_hidden_states")
        for server in (prefill, decode):
            wait_until(lambda each=server: pages_in_use(each) == 0, 5, "pages back")  # type: ignore[misc]
