"""Every error code that the program can answer with is counted under its own name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.types import errors, refusals
from headrace.core.types.errors import CANCELLED, ErrorInfo
from headrace.core.types.requests.outcomes import ENDS, FAILED, OTHER, REFUSED, end_of, end_of_answer
from tests.deployment.files import PACKAGES, ROOT

MAKERS = ("ErrorInfo", "invalid")
OF_OTHER_REQUESTS = {  # answers to requests without a prompt, of probes, and to what has not become a request
    "for_operators",
    "head_timeout",
    "too_many_connections",
    "trace_running",
    "unhealthy",
    "unknown_rid",
    "unavailable",  # of questions to other servers and to the child that checks constraints; counted as another
}


def codes(path: Path) -> Iterator[str]:
    """Error codes that a file writes down: given to what makes errors, or constants that end in such a call."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    shared = {name: value for name, value in vars(errors).items() if name.isupper()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)
                elif keyword.arg == "code" and isinstance(keyword.value, ast.Name):
                    name = keyword.value.id
                    if name in constants or name in shared:
                        yield (constants | shared)[name]


def test_codes_of_the_program_are_known() -> None:
    found = {code for package in PACKAGES for path in (ROOT / package).rglob("*.py") for code in codes(path)}
    found |= {kind.code for kind in refusals.TABLE.values()}
    assert {"prompt_too_long", "no_peer", "unknown_field", "no_prefill_server"} <= found, "the search finds too little"
    unknown = found - {*REFUSED, *FAILED, CANCELLED, *OF_OTHER_REQUESTS}
    assert not unknown, f"put them into core/types/requests/outcomes.py: {sorted(unknown)}"


def test_each_end_is_there_once() -> None:
    assert len(set(ENDS)) == len(ENDS)
    assert {*REFUSED} & {*FAILED} == {OTHER}


@pytest.mark.parametrize(
    ("code", "status", "end"),
    [
        ("deadline_exceeded", 504, ("failed", "deadline_exceeded")),
        ("cancelled", 499, ("cancelled", "cancelled")),
        ("queue_full", 429, ("refused", "queue_full")),
        ("peer_gone", 502, ("failed", "peer_gone")),
        ("of_a_later_release", 502, ("failed", "other")),
        ("of_a_later_release", 422, ("refused", "other")),
        ("other", 400, ("refused", "other")),
    ],
)
def test_ends_of_errors(code: str, status: int, end: tuple[str, str]) -> None:
    assert end_of(ErrorInfo(code=code, message="x", status=status)) == end


def test_ends_of_answers_without_an_error() -> None:
    assert end_of_answer(499) == ("cancelled", "cancelled")
    assert end_of_answer(500) == ("failed", "other")
    assert end_of_answer(405) == ("refused", "other")
