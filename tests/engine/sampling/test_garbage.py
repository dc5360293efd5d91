"""A plan's tensors are let go of with its result, without the garbage collector: on a GPU they are its memory."""

from pathlib import Path

from headrace.core.types.requests.request import SamplingParams
from tests.engine.models import CONFIGS, Prompt, make_runner, random_tokens, save_model
from tests.garbage import Garbage


def test_plans_leave_no_cycles(tmp_path: Path) -> None:
    save_model(CONFIGS["llama"], tmp_path)
    runner = make_runner(tmp_path, dtype="float32")
    params = SamplingParams(temperature=1.0, seed=1, logprobs=3)
    prompt = Prompt(0, random_tokens(40, seed=1), [0, 1, 2], 16)
    with Garbage() as garbage:
        runner.execute([prompt.row(0, 20)])
        garbage.forget()
        runner.execute([prompt.row(20, 20, sample=params)])
        for position in range(40, 44):
            runner.execute([prompt.row(position, 1, tokens=b"", sample=params)])
        assert not {kind for kind in garbage.found() if kind.startswith(("headrace.", "torch."))}
