"""States of requests in a stage and on a server: checkpoints give what computing the whole prompt gives."""

from pathlib import Path

import pytest
import torch

from tests.e2e.expert_models import VOCABULARY
from tests.e2e.harness import serving
from tests.engine.models import Prompt, make_runner, random_tokens, reported_logprobs
from tests.models.architectures import ARCHITECTURES
from tests.models.zoo import make_model, save_for_servers

PAGE, LENGTH, CUT = 16, 70, 48
SLOT, CHECKPOINT = 5, 6


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3-next", "granite4", "jamba"))]
)
def test_a_request_goes_on_from_a_checkpoint_which_stays_as_it_is(name: str, tmp_path: Path) -> None:
    make_model(ARCHITECTURES[name]).save_pretrained(tmp_path)
    runner = make_runner(tmp_path, decoder="library")
    tokens = random_tokens(LENGTH)
    first = Prompt(1, tokens, [3, 1, 9, 5, 12], PAGE)
    runner.execute([first.row(0, CUT, checkpoint=CHECKPOINT)])
    whole = runner.execute([first.row(CUT, LENGTH - CUT)]).samples[0]
    for request in (2, 3):  # the second one in single tokens, which some modules compute in place
        step = 1 if request == 3 else LENGTH - CUT
        for start in range(CUT, LENGTH, step):
            again = Prompt(request, tokens, [3, 1, 9, 5, 12], PAGE)
            resume = CHECKPOINT if start == CUT else -1
            found = runner.execute([again.row(start, step, slot=SLOT, resume=resume)])
        torch.testing.assert_close(reported_logprobs(found.samples[0]), reported_logprobs(whole), atol=2e-3, rtol=2e-3)


@pytest.mark.full
def test_a_server_caches_prompts_up_to_a_checkpoint(tmp_path: Path) -> None:
    save_for_servers("lfm2", tmp_path)
    flags = ("--model", str(tmp_path), "--dtype", "float32", "--chunk-tokens", "128", "--threads", "1")
    with serving("--role", "colocated", *flags) as server:
        prompt = [token % VOCABULARY for token in random_tokens(400)]

        def answer(tokens: list[int]) -> tuple[int, str]:
            body = {"prompt": tokens, "max_tokens": 8, "temperature": 0}
            found = server.post("/v1/completions", body).json()
            return found["usage"]["prompt_tokens_details"]["cached_tokens"], found["choices"][0]["text"]

        cold = answer(prompt)
        assert cold[0] == 0
        assert answer(prompt) == (384, cold[1])
        assert answer(prompt[:300])[0] == 256
