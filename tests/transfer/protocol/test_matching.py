"""What two servers compare at their hello: splits of layers and heads, and everything else that has to fit."""

from collections import Counter
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from headrace.core.types.kv.geometry import Component, Geometry
from headrace.transfer.control.session_table import SessionTable
from headrace.transfer.protocol.matching import check_geometries, check_hello, check_welcome, components_of
from headrace.transfer.protocol.messages import ComponentShape, Refuse, StageInfo, Welcome
from tests.transfer.control.session_table import GEOMETRY, OFFER, book, hello, joined
from tests.transfer.ranks import sides, with_components

HALF = replace(GEOMETRY, layers=2)
DRAFT = ComponentShape("draft_kv", "float16", (1, 2, 2, 64))

MISMATCHES = [
    ({"protocols": (2, 3)}, "protocol_mismatch", "1", "(2, 3)"),
    ({"fingerprint": "model-2"}, "fingerprint_mismatch", "model-1", "model-2"),
    ({"metadata_version": 9}, "metadata_version_mismatch", "1", "9"),
    ({"metadata_bytes": 64}, "metadata_bytes_mismatch", "256", "64"),
    ({"checksums": ("crc32",)}, "checksum_mismatch", "xxh3_64", "crc32"),
    ({"checksums": ("none",)}, "checksum_mismatch", "xxh3_64", "none"),
    ({"backends": ("mooncake",)}, "backend_mismatch", "zmq", "mooncake"),
    ({"components": (DRAFT,)}, "components_mismatch", "none", "draft_kv float16 [1, 2, 2, 64]"),
    ({"geometries": (HALF, replace(HALF, layer_start=3))}, "layers_mismatch", "4", "5"),
    (
        {"geometries": (replace(HALF, layers=1), replace(HALF, layer_start=2))},
        "split_mismatch",
        "8 heads",
        "6: layers 0 to 0 and heads 0 to 1 in stage 0",
    ),
    (
        {"geometries": (GEOMETRY, HALF)},
        "split_mismatch",
        "each head of each layer once",
        "layers 0 to 3 and heads 0 to 1 in stage 0; layers 0 to 1 and heads 0 to 1 in stage 1",
    ),
    (
        {"geometries": (replace(HALF, layers=3), replace(HALF, layers=3, layer_start=1))},
        "split_mismatch",
        "once",
        "layers 0 to 2",
    ),
    ({"geometries": (HALF, replace(HALF, layer_start=2, layers=0))}, "layers_mismatch", "1 or more", "0"),
    ({"geometries": (HALF, replace(HALF, layer_start=2, layers=1))}, "layers_mismatch", "4", "3"),
    ({"geometries": (HALF, replace(HALF, layer_start=2, kv_heads=1))}, "split_mismatch", "8 heads", "6: "),
    ({"geometries": (HALF, replace(HALF, layer_start=2, kv_heads=0))}, "kv_heads_mismatch", "1 or more", "0"),
    ({"geometries": (HALF, replace(HALF, layer_start=2, kv_heads=3))}, "kv_heads_mismatch", "2", "3"),
    ({"geometries": (HALF, replace(HALF, layer_start=2, head_start=-1))}, "head_start_mismatch", "0", "-1"),
    (
        {"geometries": (HALF, replace(HALF, layer_start=2, page_size=8))},
        "page_size_mismatch",
        "one for all stages",
        "[16, 8]",
    ),
    ({"geometries": (replace(GEOMETRY, dtype="bfloat16"),)}, "dtype_mismatch", "float32", "bfloat16"),
    ({"geometries": (replace(GEOMETRY, kv_heads=1),)}, "kv_heads_mismatch", "2", "1"),
    ({"geometries": (replace(GEOMETRY, head_start=3),)}, "head_start_mismatch", "0", "3"),
    ({"geometries": (replace(GEOMETRY, head_dim=16),)}, "head_dim_mismatch", "8", "16"),
    ({"geometries": (replace(GEOMETRY, layers=5),)}, "layers_mismatch", "4", "5"),
    ({"geometries": (replace(GEOMETRY, layer_start=4),)}, "layer_start_mismatch", "0", "4"),
    ({"geometries": (replace(GEOMETRY, page_size=0),)}, "page_size_mismatch", "1 to 65536", "0"),
    ({"geometries": (replace(GEOMETRY, page_size=-4),)}, "page_size_mismatch", "1 to 65536", "-4"),
]


@given(st.data(), st.integers(1, 8), st.integers(1, 16))
def test_layers_and_heads_may_be_split_in_any_way_and_order_on_the_two_sides(
    data: st.DataObject, layers: int, heads: int
) -> None:
    ours, theirs = (tuple(data.draw(sides(layers, heads, page_size))) for page_size in (16, 5))
    assert check_geometries(ours, theirs) is None
    assert check_geometries(theirs, ours) is None


@given(st.data(), st.integers(1, 8), st.integers(1, 16))
def test_ranks_that_leave_a_gap_or_overlap_are_refused(data: st.DataObject, layers: int, heads: int) -> None:
    ours, theirs = (data.draw(sides(layers, heads, page_size)) for page_size in (16, 5))
    number = data.draw(st.integers(0, len(theirs) - 1))
    field = data.draw(st.sampled_from(["layers", "kv_heads", "layer_start", "head_start"]))
    changed = replace(theirs[number], **{field: asdict(theirs[number])[field] + data.draw(st.sampled_from([-1, 1]))})
    for ranks in ([*theirs[:number], changed, *theirs[number + 1 :]], theirs[:number] + theirs[number + 1 :]):
        owned = Counter(
            (layer, head)
            for rank in ranks
            for part in rank.tensors
            for layer in range(part.layer_start, part.layer_end)
            for head in range(part.head_start, part.head_end)
        )
        assert owned != Counter(dict.fromkeys(product(range(layers), range(heads)), 1))
        if ranks:
            refuse = check_geometries(tuple(ours), tuple(ranks), replicas=True)
            assert refuse is not None
            assert refuse.ours != refuse.theirs


def test_a_peer_may_repeat_heads_in_more_ranks_than_there_are_heads_and_a_prefill_server_may_not() -> None:
    halves = tuple(replace(GEOMETRY, kv_heads=1, head_start=head) for head in (0, 0, 1, 1))
    made = book()
    [(_, welcome)] = made.receive(b"a", hello(geometries=halves), 0.0).replies
    assert isinstance(welcome, Welcome)
    assert check_welcome(hello(geometries=halves), welcome) is None
    stages = tuple(StageInfo(rank, 7001 + rank, geometry) for rank, geometry in enumerate(halves))
    refuse = check_welcome(hello(), replace(welcome, stages=stages))
    assert refuse is not None
    assert refuse.code == "split_mismatch"


PLAIN = (GEOMETRY,)
LATENT = Component("latent", "bfloat16", layers=4, kv_heads=1, head_dim=6, planes=1)
BOTH = (replace(GEOMETRY, components=(Component("draft", "float32", 1, 2, 8), LATENT)),)
UNLIKE: list[tuple[dict[str, Any], str, str]] = [
    ({"dtype": "float16"}, "dtype of latent: bfloat16", "float16 at stage 0 of the decode server"),
    ({"head_dim": 5}, "head_dim of latent: 6", "5 at stage 0 of the decode server"),
    ({"planes": 2}, "planes of latent: 1", "2 at stage 0 of the decode server"),
    ({"layers": 0}, "layers of latent: 1 or more", "0 at stage 0 of the decode server"),
    ({"kv_heads": -1}, "kv_heads of latent: 1 or more", "-1 at stage 0 of the decode server"),
    ({"layers": 3}, "layers of latent: 4", "3 at the decode server"),
    ({"kv_heads": 2}, "kv_heads of latent: 1", "2 at the decode server"),
    ({"layer_start": 1}, "layer_start of latent: 0", "1 at the decode server"),
    ({"head_start": 1}, "head_start of latent: 0", "1 at the decode server"),
]


def offering(geometries: tuple[Geometry, ...]) -> SessionTable:
    """A control endpoint whose stages have these pools."""
    return book(offer=replace(OFFER, geometries=geometries, data_ports=tuple(range(7001, 7001 + len(geometries)))))


@given(st.data(), st.integers(1, 8), st.integers(1, 16))
def test_components_may_be_split_in_any_way_and_named_in_any_order(
    data: st.DataObject, layers: int, heads: int
) -> None:
    wholes = [Component("draft", "float16", data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8)), 2), LATENT]
    ours = tuple(data.draw(with_components(data.draw(sides(layers, heads, 16)), wholes)))
    theirs = tuple(data.draw(with_components(data.draw(sides(layers, heads, 5)), wholes[::-1], replicas=True)))
    assert components_of(ours) == components_of(theirs)
    assert check_geometries(ours, theirs, replicas=True) is None


@pytest.mark.parametrize(("ours", "theirs"), [(PLAIN, BOTH), (BOTH, PLAIN)])
def test_components_that_one_side_lacks_are_refused_by_either_side(
    ours: tuple[Geometry, ...], theirs: tuple[Geometry, ...]
) -> None:
    """Where the list names them, and where the geometries alone do."""
    here, there = (
        ", ".join(f"{one.name} {one.dtype} {list(one.shape)}" for one in components_of(side)) or "none"
        for side in (ours, theirs)
    )
    [(_, refuse)] = (
        offering(ours).receive(b"a", hello(geometries=theirs, components=components_of(theirs)), 0.0).replies
    )
    assert refuse == Refuse(
        code="components_mismatch",
        message=f"components: {here} at the prefill server, {there} at the decode server",
    )
    [(_, refuse)] = offering(ours).receive(b"a", hello(geometries=theirs, components=components_of(ours)), 0.0).replies
    assert isinstance(refuse, Refuse)
    assert refuse.code == "components_mismatch"
    assert "kv" in refuse.message
    said = hello(geometries=ours, components=components_of(ours))
    [(_, welcome)] = offering(ours).receive(b"a", said, 0.0).replies
    assert isinstance(welcome, Welcome)
    assert check_welcome(said, welcome) is None
    assert check_welcome(said, replace(welcome, components=components_of(theirs))) == Refuse(
        code="components_mismatch",
        message=f"components: {there} at the prefill server, {here} at the decode server",
    )


@pytest.mark.parametrize(("changes", "ours", "theirs"), UNLIKE)
def test_a_component_that_is_not_the_same_is_refused_naming_both_values(
    changes: dict[str, Any], ours: str, theirs: str
) -> None:
    """The list says what the stages' geometries do not keep."""
    [geometry] = BOTH
    other = replace(geometry, components=(geometry.components[0], replace(LATENT, **changes)))
    [(_, refused)] = (
        offering(BOTH).receive(b"a", hello(geometries=(other,), components=components_of(BOTH)), 0.0).replies
    )
    message = f"components: {ours} at the prefill server, {theirs}"
    assert refused == Refuse(code="components_mismatch", message=message)


def test_a_component_has_each_head_of_each_layer_once_and_its_name_too() -> None:
    [geometry] = BOTH
    draft, latent = geometry.components
    halves = tuple(replace(geometry, kv_heads=1, head_start=head) for head in (0, 1))
    assert check_geometries(BOTH, halves) is not None
    assert check_geometries(BOTH, halves, replicas=True) is None
    once = halves[0], replace(halves[1], components=())
    assert check_geometries(BOTH, once) is None
    gap = halves[0], replace(halves[1], components=(replace(latent, layers=1),))
    for ranks in (halves, gap):
        refuse = check_geometries(BOTH, ranks)
        assert refuse is not None
        assert refuse.code == "components_mismatch"
        assert (refuse.field, refuse.component) == ("split", "latent" if ranks is gap else "draft")
    for components in ((draft, latent, latent), (draft, latent, replace(latent, name="kv"))):
        refuse = check_geometries(BOTH, (replace(geometry, components=components),))
        assert refuse is not None
        assert refuse.code == "components_mismatch"
        assert refuse.ours == "each name once"


def test_a_pool_may_have_components_alone_if_both_sides_say_so() -> None:
    bare = (replace(GEOMETRY, layers=0, kv_heads=0, components=(LATENT,)),)
    whole = (replace(GEOMETRY, components=(LATENT,)),)
    assert check_geometries(bare, bare) is None
    refuse = check_geometries(whole, bare)
    assert refuse is not None
    assert (refuse.field, refuse.ours, refuse.theirs) == ("components", "kv, latent", "latent")


@pytest.mark.parametrize(("changes", "code", "ours", "theirs"), MISMATCHES)
def test_a_mismatch_is_refused_at_the_hello_naming_both_values(
    changes: dict[str, Any], code: str, ours: str, theirs: str
) -> None:
    """G6"""
    made = book()
    outcome = made.receive(b"a", hello(**changes), 0.0)
    [(_, refuse)] = outcome.replies
    assert isinstance(refuse, Refuse)
    assert refuse.code == code
    here, there = refuse.message.split(" at the prefill server, ")
    assert ours in here
    assert theirs in there
    assert there.endswith("the decode server")
    assert (outcome.events, made.peers) == ([], 0)


def test_a_refusal_says_which_server_has_which_value_and_names_both_models() -> None:
    """The same text, whichever side has found it; sides of earlier releases name no model."""
    served, said = replace(OFFER, model="llama"), hello(fingerprint="model-2", model="models/qwen")
    [(_, refuse)] = book(offer=served).receive(b"a", said, 0.0).replies
    assert isinstance(refuse, Refuse)
    assert refuse.message == (
        "fingerprint: model-1 at the prefill server (model llama), model-2 at the decode server (model models/qwen)"
    )
    [(_, welcome)] = book(offer=served).receive(b"a", hello(), 0.0).replies
    assert isinstance(welcome, Welcome)
    assert (welcome.model, check_welcome(said, welcome)) == ("llama", refuse)
    earlier = check_welcome(hello(fingerprint="model-2"), replace(welcome, model=""))
    assert earlier is not None
    assert earlier.message == "fingerprint: model-1 at the prefill server, model-2 at the decode server"
    dtype = check_hello(served, ("xxh3_64",), hello(geometries=(replace(GEOMETRY, dtype="int8"),), role="cache"))
    assert dtype is not None
    assert dtype.message == "dtype: float32 at the prefill server (model llama), int8 at stage 0 of the peer"


def test_a_refusal_of_the_longest_values_and_names_is_a_message() -> None:
    long = "x" * 256
    said = hello(fingerprint="f" * 256, model=long)
    refuse = check_hello(replace(OFFER, fingerprint="g" * 256, model=2 * long), ("xxh3_64",), said)
    assert refuse is not None
    assert refuse.message.count("(model x") == 2, "neither is cut off"
    encoded = msgspec.msgpack.encode(refuse)
    assert msgspec.msgpack.decode(encoded, type=Refuse) == refuse
    [(_, welcome)] = book(offer=replace(OFFER, model=2 * long)).receive(b"a", hello(), 0.0).replies
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(welcome), type=Welcome).model == long


@pytest.mark.parametrize("page_size", [1, 16, 17, 64])
def test_page_sizes_may_differ(page_size: int) -> None:
    made, _ = joined(geometries=(replace(GEOMETRY, page_size=page_size),))
    assert made.peers == 1
