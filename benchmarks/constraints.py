"""Structured output: time per decoded token with a constraint beside none, and what a constraint takes to compile.

`python -m benchmarks.constraints`. Decoding steps of the engine alone, with so many requests in a batch; each step is
run without constraints and with one for every request, in turn, at the same positions. Tokens are drawn at temperature
1, so that the text goes through all of the grammar.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from benchmarks.arguments import add_model, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.packed import pack
from headrace.core.types.requests.constraint import Constraint, GrammarStart
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.grammar.compiler import GrammarVocabulary, compile_constraint, load_vocabulary
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.runner import ModelRunner

PAGE = 16
PROMPT = 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 40}},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
WIDE = {
    "type": "object",
    "properties": {f"field_{number}": {"type": ["string", "number", "null"]} for number in range(60)},
    "required": [f"field_{number}" for number in range(60)],
}
CONSTRAINTS = {
    "list of persons": Constraint("json", json.dumps({"type": "array", "items": PERSON, "minItems": 100})),
    "60 fields": Constraint("json", json.dumps(WIDE)),
    "any object": Constraint("json", '{"type": "object"}'),
    "expression": Constraint("regex", "([a-z]+@[a-z]+\\.(com|org), ){50}"),
    "choice of 1,000": Constraint("choice", json.dumps([f"choice number {number}" for number in range(1000)])),
}


class Steps(NamedTuple):
    """Seconds of decoding steps."""

    plain: list[float]
    constrained: list[float]


def measure(runner: ModelRunner, constraint: Constraint, batch: int, steps: int) -> Steps:
    """Steps of a batch without and with the constraint, in turn."""
    pages = -(-(PROMPT + steps + 1) // PAGE)
    found = Steps([], [])
    for step in range(steps + 1):
        for constrained, times in enumerate(found):
            rows = [_row(number, bool(constrained), constraint, step, batch, pages) for number in range(batch)]
            started = time.perf_counter()
            result = runner.execute(rows)
            if step:  # the first one computes the prompts
                times.append(time.perf_counter() - started)
            assert not result.rejected, result.rejected[0].message
    for request in range(2 * batch):
        runner.release(request)
    return found


def _row(number: int, constrained: bool, constraint: Constraint, step: int, batch: int, pages: int) -> PlanRow:
    """Request number, or number + batch with the constraint, at a step; step 0 computes its prompt."""
    request = number + batch * constrained
    start = PROMPT + step - 1 if step else 0
    return PlanRow(
        request=request,
        start=start,
        count=1 if step else PROMPT,
        pages=pack(range(request * pages, (request + 1) * pages)),
        tokens=b"" if step else pack(prompt(PROMPT, number)),
        sample=SamplingParams(temperature=1.0, seed=number, grammar=constraint.key if constrained else ""),
        generated=step,
        grammar=GrammarStart(constraint) if constrained and not step else None,
    )


def compile_row(name: str, constraint: Constraint, vocabulary: GrammarVocabulary, rounds: int) -> tuple[str, ...]:
    """A row of the table of compile times."""
    compiled: list[float] = []
    first: list[float] = []
    later: list[float] = []
    accepted: list[float] = []
    for seed in range(rounds):
        started = time.perf_counter()
        grammar = compile_constraint(constraint, vocabulary)
        compiled.append(time.perf_counter() - started)
        random = Random(seed)
        for step in range(60):
            started = time.perf_counter()
            allowed = grammar.mask()
            (later if step else first).append(time.perf_counter() - started)
            token = random.choice(allowed.nonzero()[0].tolist())
            started = time.perf_counter()
            grammar.accept((token,))
            accepted.append(time.perf_counter() - started)
            if grammar.ended:
                break
    return (name, spread([1e3 * each for each in compiled]), spread([1e3 * each for each in first]),
            f"{1e6 * statistics.mean(later):,.0f}", f"{1e6 * statistics.mean(accepted):,.0f}")  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Print both tables."""
    parser = make_parser("constraints", __doc__)
    add_model(parser)
    add_threads(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="N", help="requests in a batch")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="decoding steps of each measurement")
    given = parser.parse_args(arguments)
    words = load_spec(resolve_source(given.model)).vocab_size
    with tempfile.TemporaryDirectory() as cache:
        load_vocabulary(given.model, cache, words)  # converts the tokenizer, as the start of a server does
        started = time.perf_counter()
        vocabulary = load_vocabulary(given.model, cache, words)
    loaded_s = time.perf_counter() - started
    rows = [compile_row(name, constraint, vocabulary, 10) for name, constraint in CONSTRAINTS.items()]
    columns = ("constraint", "compile, ms", "first mask, ms", "mean later mask, us", "mean token, us")
    print_table(f"vocabulary of {words:,}, loaded in {loaded_s:.2f} s", columns, rows)
    largest = max(given.batches)
    pages = 2 * largest * -(-(PROMPT + given.steps + 1) // PAGE)
    length = PROMPT + given.steps + 1
    model = ModelConfig(model=given.model, dtype=given.dtype, device="cpu", max_model_len=length)
    runner = ModelRunner(plan_rank(model, EngineConfig(page_size=PAGE, kv_pages=pages, threads=given.threads)))
    runner.warm_up()
    rows = []
    for batch in given.batches:
        for name, constraint in CONSTRAINTS.items():
            with console.status(f"{name}, {batch} requests"):
                plain, constrained = measure(runner, constraint, batch, given.steps)
            ratio = statistics.median(b / a for a, b in zip(plain, constrained, strict=True))
            mean = sum(constrained) / sum(plain)
            medians = [f"{1e3 * statistics.median(times):.2f}" for times in (plain, constrained)]
            rows.append((f"{name}, batch of {batch}", *medians, f"{ratio - 1:+.1%}", f"{mean - 1:+.1%}"))
    columns = ("constraint", "none, ms/step", "constrained, ms/step", "median ratio", "ratio of means")
    print_table(f"decoding steps of {given.model}, {given.dtype}, {given.threads} threads", columns, rows)
    return 0


if __name__ == "__main__":
    run(main)
