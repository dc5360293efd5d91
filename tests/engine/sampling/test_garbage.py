"""A plan's tensors are let go of with its result, without the garbage collector: on a GPU they are its memory."""

import gc

import pytest

from headrace.core.types.requests.request import SamplingParams
from tests.engine.models import CONFIGS, Prompt, make_runner, random_tokens, save_model


def test_plans_leave_no_cycles(tmp_path_factory: pytest.TempPathFactory, kept_garbage: None) -> None:
    folder = tmp_path_factory.mktemp("model")
    save_model(CONFIGS["llama"], folder)
    runner = make_runner(folder, dtype="float32")
    params = SamplingParams(temperature=1.0, seed=1, logprobs=3)
    prompt = Prompt(0, random_tokens(40, seed=1), [0, 1, 2], 16)
    runner.execute([prompt.row(0, 20)])
    gc.collect()
    gc.garbage.clear()
    runner.execute([prompt.row(20, 20, sample=params)])
    for position in range(40, 44):
        runner.execute([prompt.row(position, 1, tokens=b"", sample=params)])
    gc.collect()
    kinds = {f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage}
    assert not {kind for kind in kinds if kind.startswith(("headrace.", "torch."))}
