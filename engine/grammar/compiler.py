"""Compiles constraints to grammars over the model's vocabulary, by llguidance.

The vocabulary is loaded with the first constraint: it takes about a second, and servers without constraints do without
its memory. Compiling takes milliseconds; what a hostile constraint may take is bounded by parser_limits() and
MAX_TEXT_BYTES.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.core.types.errors import ConfigError
from headrace.core.types.requests.constraint import Constraint
from headrace.engine.grammar.schema.canonical import canonical
from headrace.engine.grammar.schema.parts import SchemaError
from headrace.engine.model.source import resolve_source
from headrace.engine.model.stub import END, stub_tokenizer
from headrace.engine.model.tokenizer_store import load_record

if TYPE_CHECKING:  # it takes a quarter of a second to import, which servers without constraints do without
    import llguidance

MAX_TEXT_BYTES = 1 << 16  # of a constraint
MAX_CACHED = 64  # grammars
MAX_CACHED_BYTES = 1 << 18  # of their texts
MESSAGE_CHARS = 300
NOTHING_NEXT = "a part of it matches no text, so that nothing may come next"
_SCHEMA = re.compile(r"%json\s+(?=[{\[tf\"])")


def parser_limits() -> "llguidance.LLParserLimits":
    """What compiling a grammar and one step of it may take: about a second and 60 MB for the worst ones."""
    import llguidance

    return llguidance.LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=30_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class GrammarError(Exception):
    """A constraint that cannot be compiled, or a grammar that cannot go on; the message says why."""


class Grammar:
    """A compiled constraint, and how far the text of one request has got in it."""

    def __init__(self, matcher: "llguidance.LLMatcher", words: int) -> None:
        """words: entries of the vocabulary."""
        self._matcher = matcher
        self._words = words

    def mask(self) -> NDArray[np.bool_]:
        """Which tokens may come next: [vocabulary]. Those that end the text are among them where it may end. Raises
        GrammarError if that cannot be found within the limits."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._words, bitorder="little").view(np.bool_)

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens. Raises GrammarError for one that is not allowed."""
        for token in tokens:
            if not self._matcher.consume_token(token):
                self._check()
                raise GrammarError(f"token {token} is not allowed")

    def allows(self, token: int) -> bool:
        """Whether this token may come next. Also one that mask() leaves out: where the next characters are certain, it
        has only the tokens in which the tokenizer writes them."""
        return self.follows((token,)) or bool(self.mask()[token])

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens may come next, all of them."""
        return self._matcher.validate_tokens(list(tokens)) == len(tokens)

    @property
    def ended(self) -> bool:
        """Nothing but the end of the text may come next."""
        return self._matcher.is_stopped()

    def copy(self) -> "Grammar":
        """The same state, for another request."""
        return Grammar(self._matcher.deep_copy(), self._words)

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error()
            raise GrammarError(NOTHING_NEXT if "NoExtensionBias" in why else _cut(why))


class GrammarVocabulary(NamedTuple):
    """The tokens of a model as llguidance has them."""

    tokenizer: "llguidance.LLTokenizer"
    words: int
    """Entries of the model's output; those without a token are never allowed."""


class GrammarCompiler:
    """Compiles constraints, and keeps the last ones. Used by one thread at a time."""

    def __init__(self, model: str, cache_dir: str, words: int) -> None:
        """model: as given by --model. cache_dir: where converted tokenizers are kept, "" for nowhere. words: entries of
        the model's vocabulary."""
        self._model = model
        self._cache_dir = cache_dir
        self._words = words
        self._vocabulary: GrammarVocabulary | None = None
        self._cache: OrderedDict[Constraint, Grammar] = OrderedDict()  # least recently used first
        self._cached_bytes = 0

    def load(self) -> GrammarVocabulary:
        """The vocabulary, loaded now if it is not. Raises GrammarError for a model without a tokenizer that can be
        used."""
        if self._vocabulary is None:
            self._vocabulary = load_vocabulary(self._model, self._cache_dir, self._words)
        return self._vocabulary

    def compile(self, constraint: Constraint) -> Grammar:
        """A grammar at its beginning. Raises GrammarError."""
        found = self._cache.pop(constraint, None)
        if found is None:
            found = compile_constraint(constraint, self.load())
            self._cached_bytes += len(constraint.text)
        self._cache[constraint] = found
        while len(self._cache) > MAX_CACHED or (self._cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1):
            self._cached_bytes -= len(self._cache.popitem(last=False)[0].text)
        return found.copy()


def load_vocabulary(model: str, cache_dir: str, words: int) -> GrammarVocabulary:
    """The vocabulary of a model. Holds the GIL for most of a second. Raises GrammarError for a model without a
    tokenizer that can be used, or without a token that ends a text."""
    import llguidance

    try:
        source = resolve_source(model)
        if source.kind == "stub":
            text = stub_tokenizer(model).to_str()
            ends: tuple[int, ...] = (END,)
        else:
            record = load_record(source, cache_dir)
            text, ends = record.backend, record.eos_ids
    except ConfigError as error:
        raise GrammarError(str(error)) from error
    if not ends:
        raise GrammarError("the model names no token that ends a text")
    try:
        tokenizer = llguidance.LLTokenizer(text, n_vocab=words, eos_token=list(ends))
    except ValueError as error:
        raise GrammarError(f"the model's tokenizer cannot be used for constraints: {_cut(str(error))}") from error
    return GrammarVocabulary(tokenizer, words)


def compile_constraint(constraint: Constraint, vocabulary: GrammarVocabulary) -> Grammar:
    """A grammar at its beginning. Raises GrammarError for a constraint that is wrong, too large or not supported."""
    import llguidance

    size = len(constraint.text.encode())
    if size > MAX_TEXT_BYTES:
        raise GrammarError(f"it has {size} bytes, and {MAX_TEXT_BYTES} are the limit")
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, _source(constraint), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(_cut(matcher.get_error()))
    return Grammar(matcher, vocabulary.words)


def _source(constraint: Constraint) -> str:
    """The constraint in llguidance's own form. Raises GrammarError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    text = constraint.text
    try:
        match constraint.kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(canonical(text, parser_limits()))
            case "regex":
                return LLMatcher.grammar_from_regex(text)
            case "choice":
                return LLMatcher.grammar_from_lark(
                    f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, json.loads(text)))}"
                )
            case "grammar":
                return LLMatcher.grammar_from_lark(_with_canonical_schemas(any_to_lark(text)))
    except SchemaError as error:
        raise GrammarError(_cut(str(error))) from error
    except (ValueError, RecursionError) as error:
        raise GrammarError(_cut(str(error))) from error
    except Exception as error:  # any_to_lark raises what it likes
        raise GrammarError(f"it is no grammar: {type(error).__name__} {_cut(str(error))}") from error


def _with_canonical_schemas(lark: str) -> str:
    """A grammar in Lark with its JSON schemas in the form that is kept to. Raises SchemaError."""
    parts, at = [], 0
    while (found := _SCHEMA.search(lark, at)) is not None:
        try:
            _, end = json.JSONDecoder().raw_decode(lark, found.end())
        except ValueError as error:
            raise SchemaError(f"a schema of %json is no JSON: {error}") from None
        parts += [lark[at : found.end()], canonical(lark[found.end() : end], parser_limits())]
        at = end
    return "".join((*parts, lark[at:]))


def _cut(text: str) -> str:
    """The library's reason as error messages repeat it: on one line, and not longer than people read."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= MESSAGE_CHARS else f"{line[:MESSAGE_CHARS]}..."
