"""Constraints of structured output: what the generated text has to match, as requests, prefill servers and stages have
it in common."""

import hashlib
from typing import Literal

import msgspec

ConstraintKind = Literal["json", "regex", "choice", "grammar"]


class Constraint(msgspec.Struct, frozen=True):
    """What the text of a request has to match."""

    kind: ConstraintKind
    """json: a JSON schema; regex: a regular expression; choice: a JSON list of texts, one of which it is; grammar: in
    GBNF (llama.cpp's EBNF) or Lark."""
    text: str
    """The constraint, in that language."""

    @property
    def key(self) -> str:
        """Names the constraint: a hash of its kind and text, 32 hexadecimal digits."""
        return hashlib.sha256(f"{self.kind}:{self.text}".encode()).hexdigest()[:32]


class GrammarStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """From where a stage masks the tokens of a request."""

    constraint: Constraint
    tokens: bytes = b""
    """Packed ids of the tokens that were generated before, elsewhere or before a preemption."""


class GrammarRejection(msgspec.Struct, frozen=True):
    """A request whose grammar cannot go on."""

    request: int
    """The number that stages know it by."""
    message: str
    """Why, in words."""
