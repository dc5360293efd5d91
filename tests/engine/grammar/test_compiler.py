"""Masks of compiled constraints, beside what a search over all tokens finds."""

import json
import re
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.checker import CheckRequest, check
from headrace.engine.grammar.compiler import MAX_CACHED, Grammar, GrammarCompiler, GrammarError
from headrace.engine.model.stub import END, stub_tokenizer

MODEL, WORDS = "stub:vocab=262", 270  # a few words beside the bytes, and entries without a token
COMPILER = GrammarCompiler(MODEL, "", WORDS)
TOKENIZER = stub_tokenizer(MODEL)
TEXTS = [TOKENIZER.decode([token], skip_special_tokens=False) for token in range(262)]
ALPHABET = ["a", "b", '"', "\n", " w257", " w259", " "]


def allowed(grammar: Grammar) -> set[int]:
    return set(np.flatnonzero(grammar.mask()).tolist())


def expected(texts: list[str], begun: str) -> set[int]:
    """Tokens after which one of these texts can still be reached, and END where one is."""
    fitting = [text[len(begun) :] for text in texts if text.startswith(begun)]
    tokens = {token for token in range(262) if token != END and any(rest.startswith(TEXTS[token]) for rest in fitting)}
    return tokens | ({END} if "" in fitting else set())


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=4).map("".join), min_size=1, max_size=4),
       st.randoms(use_true_random=False))  # fmt: skip
def test_masks_of_choices_are_those_of_a_search(texts: list[str], random: Random) -> None:
    grammar = COMPILER.compile(Constraint("choice", json.dumps(texts)))
    begun = ""
    while True:
        found = allowed(grammar)
        wanted = expected(texts, begun)
        assert found
        # Where the next character is certain, only the tokens in which the tokenizer writes it are allowed.
        certain = END not in wanted and len({TEXTS[token][0] for token in wanted}) == 1
        assert found <= wanted if certain else found == wanted
        assert all(grammar.allows(each) == (each in wanted) for each in range(WORDS))
        token = random.choice(sorted(found))
        assert grammar.allows(token)
        grammar.accept((token,))
        if token == END:
            assert begun in texts
            return
        begun += TEXTS[token]


def test_a_token_that_is_not_allowed_is_an_error_and_stays_one() -> None:
    grammar = COMPILER.compile(Constraint("regex", "ab"))
    assert not grammar.allows(ord("b"))
    with pytest.raises(GrammarError, match="token"):
        grammar.accept((ord("b"),))
    with pytest.raises(GrammarError):
        grammar.mask()
    assert allowed(COMPILER.compile(Constraint("regex", "ab"))) == {ord("a")}


def test_after_the_end_there_is_only_the_end() -> None:
    grammar = COMPILER.compile(Constraint("regex", "ab?"))
    grammar.accept((ord("a"),))
    assert allowed(grammar) == {ord("b"), END}
    assert not grammar.ended
    grammar.accept((ord("b"),))
    assert allowed(grammar) == {END}
    grammar.accept((END,))
    assert grammar.ended
    assert allowed(grammar) == {END}


def test_more_constraints_than_are_kept() -> None:
    for round in range(2):
        for number in range(MAX_CACHED + 3):
            grammar = COMPILER.compile(Constraint("regex", f"{number}"))
            assert allowed(grammar) == {ord(str(number)[0])}, round


def bombs() -> Iterator[tuple[str, Constraint]]:
    """Constraints that ask for more time or memory than they may have."""
    opened = '{"type": "object", "properties": {"a": '
    yield "too deeply", Constraint("json", opened * 900 + "{}" + "}}" * 900)
    yield "too large|too many|to compile", Constraint("regex", "((a{1000}){1000}){1000}")
    pattern = {"properties": {"a": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}}}
    yield "too large|too many|to compile", Constraint("json", json.dumps(pattern))
    alternatives = [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(4)]} for i in range(12)]
    yield "too large", Constraint("json", json.dumps({"allOf": alternatives}))
    yield "unclosed|invalid|regex", Constraint("regex", "(" * 20_000)
    yield "nested", Constraint("grammar", f'start: {"(" * 9000}"a"{")" * 9000}')
    yield "recursion|grammar", Constraint("grammar", f'root ::= {"(" * 9000}"a"{")" * 9000}')
    yield "too large|limit|[Tt]oo many", Constraint("grammar", 'start: ("a"~1000)~1000')
    yield "limit", Constraint("regex", "a" * 70_000)
    yield (
        "number of patterns|patterns",
        Constraint("json", json.dumps({"properties": {f"p{i}": {"pattern": f"a{i}"} for i in range(300)}})),
    )


@pytest.mark.parametrize(("why", "constraint"), list(bombs()))
def test_bombs_are_refused(why: str, constraint: Constraint) -> None:
    assert re.search(why, check(COMPILER, CheckRequest(constraint)).error)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json", '{"type": "array", "minItems": 1000000000, "items": {"type": "string"}}'),
        Constraint("json", '{"type": "string", "maxLength": 1000000000}'),
        Constraint("json", '{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}'),
        Constraint("regex", "(.*a.{18})*"),
        Constraint("json", '{"type": "object"}'),
    ],
)
def test_large_numbers_and_recursion_are_no_bombs(constraint: Constraint) -> None:
    assert check(COMPILER, CheckRequest(constraint)).error == ""


def test_a_model_without_an_end_has_no_constraints() -> None:
    with pytest.raises(GrammarError, match=r"no such model|does not exist"):
        GrammarCompiler("/no/such/model", "", 10).compile(Constraint("regex", "a"))


def test_thousands_of_choices() -> None:
    texts = [f"choice number {number}" for number in range(3000)]
    constraint = Constraint("choice", json.dumps(texts))
    assert check(COMPILER, CheckRequest(constraint)).error == ""
    grammar = COMPILER.compile(constraint)
    grammar.accept(tuple(b"choice number 299"))
    assert allowed(grammar) == {*b"0123456789", END}


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" | "b" C\nC: /x/ & /y/',
        'start: "a" | "c" | "d" | "e" | "b" "c" "d" C\nC: /x/ & /y/',
        'start: "a" | "b" c\nc: "d" c',
    ],
)
def test_dead_ends_of_grammars_are_found(grammar: str) -> None:
    found = check(COMPILER, CheckRequest(Constraint("grammar", grammar))).error
    assert re.search("matches no text|Too many items", found), found
