"""docs/api.md has the fields that the code serves and refuses."""

from headrace.server.api.request.other_fields import OTHER_FIELDS
from tests.deployment.api_document import BODIES, DOCUMENT, documented, written


def test_the_tables_are_those_of_the_code() -> None:
    assert DOCUMENT.read_text() == written(), "python -m tests.deployment.api_document writes them"


def test_every_body_has_a_table() -> None:
    assert set(BODIES.values()) == set(OTHER_FIELDS)
    names = {name for kind in BODIES.values() for name in (*kind.__struct_fields__, *OTHER_FIELDS[kind])}
    assert names <= documented()
