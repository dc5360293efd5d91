"""Every 429 and 503 is decided in core/types/refusals.py, and its sentences get the facts that they name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from headrace.core.types import refusals
from headrace.core.types.refusals import TABLE
from tests.deployment.files import PACKAGES, ROOT
from tests.deployment.refusals_document import DOCUMENT, written

ROOM = ROOT / "core/types/refusals.py"
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path != ROOM)
STATUSES = (429, 503)
MADE = re.compile(r"refusals\.([A-Z_]+)\.(?:error|raised)")


def decided(source: str) -> Iterator[int]:
    """Lines of a file that give an error one of these statuses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            by_name = [keyword.value for keyword in node.keywords if keyword.arg == "status"]
            by_place = node.args if ast.unparse(node.func).endswith("_failed") else []
            for value in (*by_name, *by_place):
                if any(isinstance(part, ast.Constant) and part.value in STATUSES for part in ast.walk(value)):
                    yield node.lineno


def uses(source: str) -> Iterator[tuple[str, set[str]]]:
    """The refusals that a file makes, and the facts that it gives them."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("error", "raised")
        ):
            maker = node.func.value
            if isinstance(maker, ast.Attribute) and ast.unparse(maker.value) == "refusals":
                yield maker.attr, {keyword.arg or "" for keyword in node.keywords}


def test_the_search_finds_one() -> None:
    assert list(decided("ErrorInfo(code=C, message=m, status=429)\nself._tell_failed(e, C, m, 503)")) == [1, 2]
    assert list(decided("ErrorInfo(code=C, message=m, status=502 if foreign else 503)")) == [1]
    assert not list(decided("ErrorInfo(code=C, message=m, status=error.status)"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_file_decides_one(path: Path) -> None:
    lines = list(decided(path.read_text(encoding="utf-8")))
    assert not lines, f"{path}:{lines}: put it into core/types/refusals.py"


def test_sentences_get_their_facts() -> None:
    found = [use for path in FILES for use in uses(path.read_text(encoding="utf-8"))]
    assert len(found) > 40
    for name, given in found:
        named = {field for _, field, _, _ in Formatter().parse(TABLE[name].text) if field}
        assert named == given - {"predicted_s", "stage", "at_prefill"}, name
        assert ("predicted_s" in given) == (TABLE[name].retry_s == "predicted"), name


def test_each_is_used() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    assert not [name for name in TABLE if f"refusals.{name}" not in text]


@pytest.mark.parametrize("name", TABLE)
def test_when_to_try_again(name: str) -> None:
    kind = TABLE[name]
    facts: dict[str, object] = {field: 1.5 for _, field, _, _ in Formatter().parse(kind.text) if field}
    error = kind.error(predicted_s=0.25, stage=1, at_prefill=True, **facts)
    assert (error.code, error.status, error.stage, error.at_prefill) == (kind.code, kind.status, 1, True)
    assert error.retry_after_s == (0.25 if kind.retry_s == "predicted" else kind.retry_s)
    assert kind.raised(**facts).info.message == error.message


def test_clients_text_is_not_a_sentence_of_ours() -> None:
    assert refusals.UNHEALTHY.error(problem="{why} {0}").message == "{why} {0}"


def test_the_document_lists_them() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    assert page == written(page), "python -m tests.deployment.refusals_document writes it"
