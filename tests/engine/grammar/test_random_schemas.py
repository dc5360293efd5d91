"""Random JSON schemas: what is accepted is kept to, as an independent validator sees it, and never stops in the middle
of a text; what is refused since no text satisfies it has none."""

import json
import re
from collections import Counter
from random import Random

import pytest

from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.checker import CheckRequest, check
from headrace.engine.grammar.compiler import GrammarCompiler
from headrace.engine.model.stub import END, stub_tokenizer
from tests.engine.grammar.random_schemas import VALUES, Schemas, Walk, parsed, valid

MODEL, WORDS = "stub:vocab=262", 262
COMPILER = GrammarCompiler(MODEL, "", WORDS)
TOKENIZER = stub_tokenizer(MODEL)
TEXTS = [bytes([token]) if token < 256 else TOKENIZER.decode([token]).encode() for token in range(WORDS)]


def tried(seed: int) -> str:
    """What became of the schema of a seed."""
    random = Random(seed)
    schema = Schemas(random).document()
    constraint = Constraint("json", json.dumps(schema))
    if problem := check(COMPILER, CheckRequest(constraint)).error:
        if "no text satisfies it" in problem:
            found = [value for value in VALUES if valid(schema, parsed(json.dumps(value)))]
            assert not found, (seed, schema, problem, found)
            return "unsatisfiable"
        return re.sub(r"[0-9]+|\(.*|'[^']*'|\".*", "_", problem)[:60]
    grammar = COMPILER.compile(constraint)
    ended = 0
    for wild in (3, 20, 60):
        text = Walk(random, TEXTS, END).text(grammar.copy(), wild, 600)
        if text is not None:
            ended += 1
            for first in (False, True):
                assert valid(schema, parsed(text, first=first)), (seed, schema, text)
    return "kept to" if ended else "accepted, and no text has ended"


def test_random_schemas() -> None:
    found = Counter(map(tried, range(200)))
    assert found["kept to"] > 60, found


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_schemas(part: int) -> None:
    found = Counter(map(tried, range(1000 * (part + 1), 1000 * (part + 2))))
    assert found["kept to"] > 300, found
