"""Tries a compiled constraint out on random texts.

Constraints that are too large compile in no time. They show when their masks are computed, which would hold up all
requests of a stage.
"""

import json
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.compiler import Grammar, GrammarCompiler, GrammarError

STEPS = 24  # tokens of a text
TEXTS = 16  # of a grammar, which may have dead ends; other constraints are compiled to what has none
TRIAL_S = 0.3  # of CPU time, after which no further text is begun
STEP_S = 0.25  # of CPU time for the mask of one token; usual are less than 0.02 s for the first one, 0.001 s afterwards
MAX_PATTERNS = 256  # of a schema


def try_out(grammar: Grammar, texts: int = 1) -> None:
    """Generate random texts of a few tokens. Raises GrammarError where one cannot go on, or takes too long."""
    begun = time.thread_time()
    for seed in range(texts):
        _try_text(grammar.copy(), Random(seed))
        if time.thread_time() - begun > TRIAL_S:
            return


def _try_text(grammar: Grammar, random: Random) -> None:
    for _ in range(STEPS):
        before = time.thread_time()
        allowed = np.flatnonzero(grammar.mask())
        if not len(allowed):
            raise GrammarError("it allows no text")
        token = int(allowed[random.randrange(len(allowed))])
        if grammar.ended:
            return
        grammar.accept((token,))
        if (took := time.thread_time() - before) > STEP_S:
            raise GrammarError(f"it is too large: one token takes {took:.2f} s, and {STEP_S:g} s are the limit")


def try_patterns(compiler: GrammarCompiler, constraint: Constraint) -> None:
    """Try each regular expression of a JSON schema by itself, since a random text may not come to them. Raises
    GrammarError."""
    if constraint.kind != "json":
        return
    found = sorted(set(_patterns(json.loads(constraint.text))))
    if len(found) > MAX_PATTERNS:
        raise GrammarError(f"it has {len(found)} patterns, and {MAX_PATTERNS} are the limit")
    for pattern in found:
        try:
            grammar = compiler.compile(Constraint("regex", pattern.removeprefix("^").removesuffix("$")))
        except GrammarError:
            continue  # a form that the schema's dialect has, and which has been compiled with it
        try_out(grammar)


def _patterns(schema: Any) -> Iterator[str]:
    """The texts that may be patterns, in all objects."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += part.values()
            if isinstance(pattern := part.get("pattern"), str):
                yield pattern
            if isinstance(patterns := part.get("patternProperties"), dict):
                yield from patterns
