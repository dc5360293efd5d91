"""Peers of other releases, which speak the same version of the protocol: their messages have more fields, or fewer."""

import msgspec
import pytest
from msgspec import NODEFAULT
from msgspec.structs import fields

from tests.transfer.examples import EXAMPLES, Example


def name(example: Example) -> str:
    return type(example.message).__name__


@pytest.mark.parametrize("value", [None, 7, "blue", b"\0", [[]], {"deep": {"er": [1]}}])
def test_fields_of_a_later_release_are_skipped(value: object) -> None:
    for example in EXAMPLES:
        body = msgspec.msgpack.decode(example.encoded[0])
        assert example.codec.decode(msgspec.msgpack.encode({"colour": value, **body})) == example.message, name(example)


def test_fields_that_an_earlier_release_did_not_have_mean_their_defaults() -> None:
    left_out = set()
    for example in EXAMPLES:
        body = msgspec.msgpack.decode(example.encoded[0])
        for field in fields(example.message):
            if field.encode_name not in body or field.required:
                continue
            without = {key: each for key, each in body.items() if key != field.encode_name}
            found = getattr(example.codec.decode(msgspec.msgpack.encode(without)), field.name)
            assert found == (field.default_factory() if field.default is NODEFAULT else field.default), name(example)
            left_out.add((name(example), field.name))
    assert len(left_out) > 10
