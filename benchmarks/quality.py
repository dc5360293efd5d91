"""What `--quantize int8` changes: perplexity, divergence of the next token's distribution, greedy agreement.

`python -m benchmarks.quality`. The text is the one that ships with the server, cut into prompts. Both models see the
same tokens; agreement is the share of positions at which both would choose the same token, and of prompts whose greedy
continuation is the same.
"""

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.arguments import add_model, add_threads, make_parser
from benchmarks.report import console, print_table, run
from headrace.core.config import Dtype, EngineConfig, ModelConfig, Quantize
from headrace.core.messages.orders import PlanRow
from headrace.core.types import packed
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.load_plan import plan_rank
from headrace.engine.runner import ModelRunner
from headrace.text.tokenizer import load_tokenizer

PAGE = 16  # tokens
POSITIONS = 256  # whose logits are computed at once
GREEDY = SamplingParams(temperature=0.0)


class Prediction(NamedTuple):
    """What a model makes of one prompt."""

    logprobs: Tensor  # [tokens, vocabulary], of the token after each
    continuation: list[int]  # greedy


def predict(runner: ModelRunner, ids: list[int], tokens: int) -> Prediction:
    """Logprobs at every position, and so many greedy tokens."""
    pages = packed.pack(range(ceil_div(len(ids) + tokens, PAGE)))
    hidden = runner.forward([PlanRow(1, 0, len(ids), pages, packed.pack(ids))])
    logits = torch.cat([runner._decoder.logits(part) for part in torch.split(hidden, POSITIONS)])
    sampled = [int(logits[-1].argmax())]
    while len(sampled) < tokens:
        row = PlanRow(1, len(ids) + len(sampled) - 1, 1, pages, packed.pack(sampled[-1:]), sample=GREEDY)
        sampled.append(runner.execute([row]).samples[0].token)
    return Prediction(torch.log_softmax(logits, -1), sampled)


class Differences:
    """Sums over prompts of what two models say differently."""

    def __init__(self) -> None:
        """Of none."""
        self.positions = self.agreed = self.prompts = self.same = 0
        self.loss, self.other_loss, self.divergence = 0.0, 0.0, 0.0

    def add(self, ids: list[int], one: Prediction, other: Prediction) -> None:
        """Take in both models' predictions for a prompt."""
        said, following = torch.tensor(ids[1:]), torch.arange(len(ids) - 1)
        self.loss -= float(one.logprobs[following, said].sum())
        self.other_loss -= float(other.logprobs[following, said].sum())
        self.divergence += float((one.logprobs.exp() * (one.logprobs - other.logprobs)).sum())
        self.agreed += int((one.logprobs.argmax(-1) == other.logprobs.argmax(-1)).sum())
        self.positions += len(ids)
        self.prompts += 1
        self.same += one.continuation == other.continuation

    def row(self, name: str) -> tuple[str, ...]:
        """A line of the table."""
        said = self.positions - self.prompts
        return (
            name, f"{math.exp(self.loss / said):.3f}", f"{math.exp(self.other_loss / said):.3f}",
            f"{self.divergence / self.positions:.4f}", f"{self.agreed / self.positions:.1%}",
            f"{self.same} of {self.prompts}",
        )  # fmt: skip


def make_runner(model: str, dtype: Dtype, quantize: Quantize, threads: int, length: int) -> ModelRunner:
    """A model for prompts of this length. Raises ConfigError for an unknown model."""
    engine = EngineConfig(page_size=PAGE, kv_pages=ceil_div(length, PAGE), threads=threads)
    config = ModelConfig(model=model, dtype=dtype, device="cpu", quantize=quantize)
    return ModelRunner(plan_rank(config, engine, length))


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError for an unknown model."""
    parser = make_parser("quality", __doc__)
    add_model(parser, "bfloat16")
    add_threads(parser)
    parser.add_argument("--length", type=int, default=512, metavar="TOKENS", help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, metavar="TOKENS", help="of a greedy continuation")
    parser.add_argument("--prompts", type=int, default=11, metavar="N", help="prompts, at most what the text makes")
    given = parser.parse_args(arguments)
    text = (files("headrace.server") / "data" / "adventure.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(given.model, "").encode(text)
    prompts = [ids[start : start + given.length] for start in range(0, len(ids) - given.length + 1, given.length)]
    length = given.length + given.tokens
    rows = []
    exact = make_runner(given.model, "float32", "none", given.threads, length)
    others: tuple[tuple[Dtype, Quantize], ...] = ((given.dtype, "none"), (given.dtype, "int8"))
    for dtype, quantize in others:
        runner, differences = make_runner(given.model, dtype, quantize, given.threads, length), Differences()
        name = dtype if quantize == "none" else f"{quantize}, KV in {dtype}"
        with torch.inference_mode(), console.status(name):
            for prompt in prompts[: given.prompts]:
                differences.add(
                    prompt, predict(exact, prompt, given.tokens), predict(runner, prompt, given.tokens)
                )  # fmt: skip
        rows.append(differences.row(name))
    print_table(
        f"beside float32: {min(given.prompts, len(prompts))} prompts of {given.length} tokens",
        ("", "perplexity in float32", "perplexity", "divergence, nats a token", "same next token",
         f"same {given.tokens} tokens"),
        rows,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    run(main)
