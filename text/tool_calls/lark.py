"""Pieces of grammars in Lark, as llguidance takes them: tokens that were added to a vocabulary are named by their ids
alone, and no text matches them."""

import json
import re
from collections.abc import Callable

from headrace.text.tool_calls.marks import MARKS

AddedId = Callable[[str], int | None]
"""The id of a token that was added to the vocabulary."""
ANY_TEXT = r"/(.|\n)*/"
_MARK = re.compile("(" + "|".join(map(re.escape, MARKS)) + ")")


def symbols(text: str, added_id: AddedId) -> str:
    """A fixed text, which may have marks in it."""
    pieces = [text] if added_id(text) is not None else [piece for piece in _MARK.split(text) if piece]
    ids = [added_id(piece) for piece in pieces]
    return " ".join(json.dumps(p) if i is None else f"<[{i}]>" for p, i in zip(pieces, ids, strict=True))


def opening(text: str) -> str:
    """The mark that a text begins with; "" for none."""
    found = _MARK.match(text)
    return found[0] if found is not None else ""


def rules_up_to(name: str, end: str, added_id: AddedId) -> list[str]:
    """The rule of this name, in lower case, of any text up to an end, which has a mark in it, and that end."""
    if not any(added_id(piece) is not None for piece in (end, *_MARK.split(end))):
        mark = "\n".join(map(re.escape, end.split("\n")))
        return [f"{name}[lazy]: /(.|\\n)*{slashed(mark)}/"]
    return [f"{name}: {name.upper()}_TEXT {symbols(end, added_id)}", f"{name.upper()}_TEXT: {ANY_TEXT}"]


def slashed(expression: str) -> str:
    """A regular expression between slashes, on one line."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression).replace("\n", r"\n")
