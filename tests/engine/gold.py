"""What a runner computes beside what transformers does."""

import torch

from headrace.engine.runner import ModelRunner
from tests.engine.models import (
    Prompt,
    Saved,
    pool_tokens,
    random_tokens,
    reference,
    reported_logprobs,
    run_chunks,
    shuffled_pages,
)


class Gold:
    """Comparison within a tolerance, absolute and relative, that covers the order of additions in float32."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=self._tolerance, rtol=self._tolerance)

    def check(self, runner: ModelRunner, saved: Saved, length: int, chunk: int) -> None:
        """Logprobs, the next token and the KV of a prompt in chunks."""
        size = runner.geometry.page_size
        prompt = Prompt(1, random_tokens(length, seed=length), shuffled_pages(-(-length // size), 64), size)
        logprobs, kv = reference(saved.model, prompt.tokens)
        sampled = run_chunks(runner, prompt.chunks(chunk))
        self.close(reported_logprobs(sampled), logprobs[-1])
        assert sampled.token == int(logprobs[-1].argmax())
        self.close(pool_tokens(runner, prompt.pages, length), kv)

    def check_mixed(self, runner: ModelRunner, saved: Saved) -> None:
        """Chunks of prompts and decoding rows of several lengths in the same plans."""
        pages = shuffled_pages(60, 64, seed=3)
        lengths = [33, 50, 5, 16, 100]
        prompts = [
            Prompt(index, random_tokens(length, seed=index), pages[index * 12 : index * 12 + 12], 16)
            for index, length in enumerate(lengths)
        ]
        plans = [
            [prompts[0].row(0, 20), prompts[2].row(0, 4), prompts[3].row(0, 15)],
            [prompts[4].row(0, 99), prompts[2].row(4, 1), prompts[0].row(20, 12), prompts[1].row(0, 30)],
            [prompts[0].row(32, 1), prompts[1].row(30, 20), prompts[4].row(99, 1), prompts[3].row(15, 1)],
        ]
        sampled = {sample.request: sample for plan in plans for sample in runner.execute(plan)[0]}
        for prompt in prompts:
            logprobs, kv = reference(saved.model, prompt.tokens)
            self.close(reported_logprobs(sampled[prompt.request]), logprobs[-1])
            self.close(pool_tokens(runner, prompt.pages, len(prompt.tokens)), kv)

    def check_stages(self, first: ModelRunner, last: ModelRunner, whole: ModelRunner) -> None:
        """Two stages in a row beside one."""
        assert first.fingerprint == last.fingerprint == whole.fingerprint
        prompt = Prompt(1, random_tokens(30), [9, 3], 16)
        rows = [prompt.row(0, 30)]
        self.close(last.forward(rows, first.forward(rows)), whole.forward(rows))
        pools = torch.cat([pool_tokens(first, prompt.pages, 30), pool_tokens(last, prompt.pages, 30)])
        self.close(pools, pool_tokens(whole, prompt.pages, 30))
