"""lm-eval against a server, and what transformers says of the same requests."""

from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel

from tests.e2e.harness import Server

TASKS = Path(__file__).parent / "tasks"
LENGTH = 512


def evaluated(server: Server, tokenizer: Path, task: str, limit: int | None, **model_args: Any) -> Any:
    """The result of a task by lm-eval's model local-completions, with what it asked and was answered. limit: of its
    documents."""
    asked = {"model": "tested", "base_url": f"{server.url}/v1/completions", "tokenizer": str(tokenizer)}
    return simple_evaluate(
        model="local-completions",
        model_args={**asked, "tokenizer_backend": "huggingface", "max_length": LENGTH, "max_retries": 1, **model_args},
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
    )


class Oracle:
    """Loglikelihoods and greedy texts by transformers."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Of a continuation, and whether it is what greedy sampling gives."""
        before = len(self._tokenizer.encode(context, add_special_tokens=False))
        return self._scored(self._tokenizer.encode(context + continuation, add_special_tokens=False), before)

    def rolling(self, text: str) -> float:
        """The loglikelihood of a text after the token that begins texts."""
        ids = [self._tokenizer.bos_token_id, *self._tokenizer.encode(text, add_special_tokens=False)]
        return self._scored(ids, 1)[0]

    def greedy(self, prompt: str, tokens: int) -> str:
        """The text of so many tokens."""
        ids = torch.tensor([self._tokenizer.encode(prompt, add_special_tokens=False)])
        with torch.inference_mode():
            found = self._model.generate(ids, max_new_tokens=tokens, do_sample=False)
        text: str = self._tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        return text

    def _scored(self, ids: list[int], before: int) -> tuple[float, bool]:
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._model(torch.tensor([ids])).logits[0].float(), -1)
        rows, targets = logprobs[before - 1 : -1], torch.tensor(ids[before:])
        return float(rows.gather(1, targets[:, None]).sum()), bool((rows.argmax(-1) == targets).all())
