"""docs/models.md is that of the code."""

from tests.models.document import DOCUMENT, written


def test_the_document_is_that_of_the_zoo() -> None:
    assert DOCUMENT.read_text() == written(), "python -m tests.models.document writes it"
