"""What two servers compare at their hello: splits of layers and heads, and everything else that has to fit."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from tests.transfer.ranks import sides
from tests.transfer.test_sessions import GEOMETRY, book, hello, joined
from transfer.matching import check_geometries, check_welcome
from transfer.messages import Component, Refuse, StageInfo, Welcome

HALF = replace(GEOMETRY, layers=2)
DRAFT = Component("draft_kv", "float16", (2, 64))

MISMATCHES = [
    ({"protocols": (2, 3)}, "protocol_mismatch", "1", "(2, 3)"),
    ({"fingerprint": "model-2"}, "fingerprint_mismatch", "model-1", "model-2"),
    ({"metadata_version": 9}, "metadata_version_mismatch", "1", "9"),
    ({"metadata_bytes": 64}, "metadata_bytes_mismatch", "256", "64"),
    ({"checksums": ("crc32",)}, "checksum_mismatch", "xxh3_64", "crc32"),
    ({"checksums": ("none",)}, "checksum_mismatch", "xxh3_64", "none"),
    ({"backends": ("mooncake",)}, "backend_mismatch", "zmq", "mooncake"),
    ({"components": (DRAFT,)}, "components_mismatch", "none", "draft_kv float16 [2, 64] there"),
    ({"geometries": (HALF, replace(HALF, layer_start=3))}, "layers_mismatch", "4", "5 there"),
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
        "layers 0 to 3 and heads 0 to 1 in stage 0; layers 0 to 1 and heads 0 to 1 in stage 1 there",
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
    ({"geometries": (HALF, replace(HALF, layer_start=2, kv_heads=3))}, "kv_heads_mismatch", "2", "3 there"),
    ({"geometries": (HALF, replace(HALF, layer_start=2, head_start=-1))}, "head_start_mismatch", "0", "-1 there"),
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
            for layer in range(rank.layer_start, rank.layer_end)
            for head in range(rank.head_start, rank.head_end)
        )
        assert owned != Counter(dict.fromkeys(product(range(layers), range(heads)), 1))
        if ranks:
            refuse = check_geometries(tuple(ours), tuple(ranks), replicas=True)
            assert refuse is not None
            assert " here, " in refuse.message


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


def test_a_welcome_that_names_components_is_refused() -> None:
    [(_, welcome)] = book().receive(b"a", hello(), 0.0).replies
    assert isinstance(welcome, Welcome)
    refuse = check_welcome(hello(), replace(welcome, components=(DRAFT,)))
    assert refuse is not None
    assert (refuse.code, refuse.message) == (
        "components_mismatch",
        "components: none here, draft_kv float16 [2, 64] there",
    )


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
    assert ours in refuse.message.split(" here, ")[0]
    assert theirs in refuse.message.split(" here, ")[1]
    assert (outcome.events, made.peers) == ([], 0)


@pytest.mark.parametrize("page_size", [1, 16, 17, 64])
def test_page_sizes_may_differ(page_size: int) -> None:
    made, _ = joined(geometries=(replace(GEOMETRY, page_size=page_size),))
    assert made.peers == 1
