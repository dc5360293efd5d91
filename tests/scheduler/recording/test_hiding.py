"""Hidden tokens: no prompt and no generated token is in a file, packed or plain, and salts are not either."""

import random
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.kv_events import BlockStored
from headrace.core.types.packed import pack, unpack
from headrace.core.types.requests.adapters import adapter_salt
from headrace.core.types.requests.constraint import Constraint
from headrace.core.types.requests.images import ImageInput, page_key
from headrace.scheduler.recording import file as module
from headrace.scheduler.recording.hiding import Hiding
from tests.scheduler.bench import Bench
from tests.scheduler.recordings import check_tape, taped

VOCABULARY = 1000
SALT, TEXT, PIXELS = "the salt of a tenant", "(yes|no), said the constraint", b"pixels of an image" * 10
IMAGE = ImageInput(digest="ab" * 32, start=1, length=2, rows=1, columns=2, pixels=PIXELS)


def sections(path: Path) -> Iterator[bytes]:
    """All that a file has, unpacked."""
    data = path.read_bytes()
    at = module._START.size + module._START.unpack_from(data)[2]
    yield data[:at]
    while at < len(data):
        _, _, _, _, packed, _ = module._SECTION.unpack_from(data, at)
        at += module._SECTION.size
        yield zlib.decompress(data[at : at + packed])
        at += packed


def test_no_token_and_no_salt_is_in_a_file(tmp_path: Path) -> None:
    """A snapshot amid requests that wait, are computed, generate and have ended, and the calls after it."""
    rng = random.Random(1)
    prompts = [[rng.randrange(200, VOCABULARY) for _ in range(24)] for _ in range(6)]
    generated = [rng.randrange(200, VOCABULARY) for _ in range(40)]
    for hidden in (True, False):
        with taped(lambda: (14,), partial(bool, hidden)) as tapes:
            bench = Bench(kv_events=True, policy="srpt", kv_pages=64)
            left = list(generated)
            for number, prompt in enumerate(prompts):
                bench.submit(
                    f"r{number}",
                    prompt,
                    max_tokens=3,
                    cache_salt=SALT if number % 2 else "",
                    stop_token_ids=(prompt[0],),
                    logit_bias=((prompt[1], 1.0),),
                    constraint=Constraint("regex", TEXT) if number == 2 else None,
                    images=(IMAGE,) if number == 3 else (),
                    repetition_penalty=1.5,
                )
                for _ in range(2):
                    forward = bench.plan()
                    if forward is not None:
                        count = sum(row.sample is not None for row in forward.rows)
                        bench.done(forward, *[left.pop() for _ in range(count)])
        path = tmp_path / str(hidden)
        assert check_tape(tapes[0], path) > 10
        everything = b"".join(sections(path))
        plain = [msgspec.msgpack.encode(prompt[at : at + 3])[1:] for prompt in prompts for at in range(0, 21, 3)]
        packed = [pack(prompt[at : at + 3]) for prompt in prompts for at in range(22)]
        used = [pack([token]) for token in generated[len(left) :]]
        secrets = [SALT.encode(), TEXT.encode(), b"ab" * 32, bytes.fromhex("ab" * 32)]
        if hidden:
            assert not [found for found in (*plain, *packed, *secrets, PIXELS) if found in everything]
        else:
            assert sum(found in everything for found in packed) > len(packed) // 2, "the search finds what is there"
            assert all(found in everything for found in (SALT.encode(), TEXT.encode()))
            assert any(found in everything for found in used)
            assert PIXELS not in everything


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40), st.binary(min_size=32, max_size=32))
def test_ids_are_replaced_one_by_one_and_within_the_vocabulary(ids: list[int], key: bytes) -> None:
    hiding = HIDINGS.setdefault(key[:1], Hiding(key[:1] * 32, VOCABULARY, 4))
    found = unpack(hiding.packed(pack(ids))).tolist()
    assert found == list(hiding.tokens(ids)) == [hiding.token(each) for each in ids]
    assert all(0 <= each < VOCABULARY for each in found)
    assert len(set(found)) == len(set(ids))


HIDINGS: dict[bytes, Hiding] = {}


def test_keys_make_other_permutations_and_ids_outside_stay() -> None:
    one, other = Hiding(b"1" * 32, VOCABULARY, 4), Hiding(b"2" * 32, VOCABULARY, 4)
    assert sorted(map(one.token, range(VOCABULARY))) == list(range(VOCABULARY))
    assert sum(one.token(each) == other.token(each) for each in range(VOCABULARY)) < 20
    assert one.tokens([-1, VOCABULARY, 1 << 30]) == (-1, VOCABULARY, 1 << 30)
    assert one.packed(pack([VOCABULARY, -5])) == pack([VOCABULARY, -5])
    assert one.packed(b"abc") == b"abc"


def test_keys_of_pages_are_those_of_hidden_prompts() -> None:
    hiding = Hiding(b"1" * 32, VOCABULARY, 4)
    tokens = pack(range(8))
    hidden = msgspec.structs.replace(IMAGE, digest=hiding.image(IMAGE.digest))
    for start in (0, 4):
        expected = page_key(hiding.packed(tokens), start, 4, [hidden])
        assert hiding.page(page_key(tokens, start, 4, [IMAGE])) == expected


def test_salts_of_adapters_stay_apart() -> None:
    hiding = Hiding(b"1" * 32, VOCABULARY, 4)
    fingerprint = "0123456789abcdef" * 2
    assert hiding.salt(adapter_salt(fingerprint, SALT)) == adapter_salt(fingerprint, hiding.salt(SALT))
    assert hiding.salt("") == ""
    assert hiding.salt(SALT) != SALT


def test_effects_are_hidden_however_deep_they_are() -> None:
    hiding = Hiding(b"1" * 32, VOCABULARY, 4)
    event = BlockStored(block_hashes=(1,), parent_block_hash=None, token_ids=(1, 2, 3, 4), block_size=4)
    assert hiding.effects(event).token_ids == hiding.tokens([1, 2, 3, 4])
    assert hiding.effects((event,))[0].token_ids == hiding.tokens([1, 2, 3, 4])
    with pytest.raises(AttributeError):
        event.token_ids = ()  # type: ignore[misc]
