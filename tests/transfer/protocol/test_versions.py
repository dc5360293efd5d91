"""Peers of other releases, which speak the same version of the protocol: their messages have more fields, or fewer."""

import msgspec
import pytest
from msgspec import NODEFAULT
from msgspec.structs import fields

from headrace.core.types.kv.backends import NixlMemory, PoolMemory, SharedMemory
from tests.transfer.examples import EXAMPLES, ON_GPU, Example


def name(example: Example) -> str:
    return type(example.message).__name__


@pytest.mark.parametrize("value", [None, 7, "blue", b"\0", [[]], {"deep": {"er": [1]}}])
def test_fields_of_a_later_release_are_skipped(value: object) -> None:
    for example in EXAMPLES:
        body = msgspec.msgpack.decode(example.encoded[0])
        assert example.codec.decode(msgspec.msgpack.encode({"colour": value, **body})) == example.message, name(example)


class EarlierMemory(msgspec.Struct, omit_defaults=True):
    """PoolMemory before pools on GPUs were shared."""

    shm: SharedMemory | None = None
    nixl: NixlMemory | None = None


def test_a_pool_on_a_gpu_is_no_pool_to_an_earlier_release_and_the_other_way_round() -> None:
    said = PoolMemory(nixl=NixlMemory(version="1.5", bytes=1, pages=1, strides=(1,) * 5), cuda_ipc=ON_GPU)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=EarlierMemory)
    assert read == EarlierMemory(nixl=said.nixl)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(read), type=PoolMemory) == PoolMemory(nixl=said.nixl)


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
