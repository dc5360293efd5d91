"""The table of refusals in docs/architecture.md: python -m tests.deployment.refusals_document writes it."""

from itertools import dropwhile

from headrace.core.types.refusals import TABLE, Refusal
from tests.deployment.files import ROOT

DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN = "| refusal | status, code | when | limit | Retry-After |\n|---|---|---|---|---|\n"


def written(text: str) -> str:
    """The document with the table of the code in the place of its own."""
    before, found, after = text.partition(BEGIN)
    assert found, "docs/architecture.md has no table of refusals"
    rest = "".join(dropwhile(lambda line: line.startswith("|"), after.splitlines(keepends=True)))
    return before + BEGIN + "".join(_row(name, kind) for name, kind in TABLE.items()) + rest


def _row(name: str, kind: Refusal) -> str:
    retry = f"{kind.retry_s:g} s" if isinstance(kind.retry_s, float) else kind.retry_s or ""
    return f"| `{name}` | {kind.status} `{kind.code}` | {kind.when} | {kind.limit} | {retry} |\n"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
