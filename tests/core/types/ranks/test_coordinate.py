"""Batch coordination: vLLM's rules V1 to V10 and SGLang's S1 to S5 and S8, transcribed literally and compared."""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types.errors import ConfigError
from headrace.core.types.ranks.coordinate import Agreement, RowPart, Rules, Vote, coordinate, halves, vote

CUT = Rules(cut=True)
PADDED_CUT = Rules(cut=True, pad="max")


@dataclass(frozen=True)
class Rank:
    """What vLLM's function is called with on one rank, and the group that it calls."""

    scheduled: list[int]
    unpadded: int
    padded: int
    allow_microbatching: bool


def transcribed(ranks: Sequence[Rank], rules: Rules) -> list[tuple[tuple[slice, ...] | None, list[int] | None]]:
    """coordinate_batch_across_dp on every rank, with the all-reduce in its middle."""
    size = len(ranks)
    if size == 1:
        return [(None, None)]  # V1
    columns = [[0] * size for _ in range(3)]
    for number, rank in enumerate(ranks):
        uniform_decode = all(tokens == 1 for tokens in rank.scheduled)
        threshold = rules.cut_decode if uniform_decode else rules.cut_prefill
        wish = rules.cut and rank.unpadded >= threshold and rank.allow_microbatching  # V2
        assert rank.padded >= rank.unpadded  # V3
        own = [[0] * size for _ in range(3)]
        own[0][number], own[1][number], own[2][number] = rank.unpadded, rank.padded, int(wish)
        columns = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(columns, own, strict=True)]  # V4
    results: list[tuple[tuple[slice, ...] | None, list[int] | None]] = []
    for rank in ranks:
        padded = [max(columns[1])] * size  # V6
        cut = all(wish == 1 for wish in columns[2])  # V7
        if cut and max(columns[1]) // 2 >= min(columns[0]):
            cut = False  # V8
        results.append((slices(rank.scheduled, padded[0] // 2) if cut else None, padded))  # V10
    return results


def slices(scheduled: list[int], split: int) -> tuple[slice, ...]:
    """V9: requests and tokens of the first half, requests and tokens of the second."""
    cum = [0, *accumulate(scheduled)]
    return (
        slice(0, bisect_left(cum, split)),
        slice(0, split),
        slice(bisect_right(cum, split) - 1, len(scheduled)),
        slice(split, cum[-1]),
    )


def as_slices(parts: tuple[list[RowPart], list[RowPart]]) -> tuple[slice, ...]:
    first, second = parts
    tokens = sum(part.count for part in first)
    return (
        slice(first[0].row, first[-1].row + 1),
        slice(0, tokens),
        slice(second[0].row, second[-1].row + 1),
        slice(tokens, tokens + sum(part.count for part in second)),
    )


def synced(rows: Sequence[dict[str, Any]], rules: Rules) -> dict[str, Any]:
    """SGLang's S2 to S4 and S8 on the gathered rows of all replicas: what has a counterpart here."""
    tokens = [row["tokens"] for row in rows]
    modes = ["DECODE" if row["mode"] == "IDLE" else row["mode"] for row in rows]
    return {
        "global_num_tokens": tokens,
        "max_len": max(-(-each // rules.multiple) * rules.multiple for each in tokens),
        "modes_equal": len(set(modes)) == 1,
        "runs": max(tokens) > 0,
        "idle_batch": [max(tokens) > 0 and each == 0 for each in tokens],
    }


def drawn(rng: random.Random) -> tuple[list[list[int]], list[bool], Rules]:
    replicas = rng.choice([1, 2, 2, 3, 4, 8])
    base = rng.choice([2, 5, 40, 600, 2000])
    rows: list[list[int]] = []
    for _ in range(replicas):
        kind = rng.random()
        if kind < 0.15:
            rows.append([])
        elif kind < 0.5:
            rows.append([1] * rng.randint(1, min(base, 80)))
        else:
            rows.append([rng.randint(1, max(1, base // 2)) for _ in range(rng.randint(1, 4))])
        if rng.random() < 0.5:
            rows[-1] = list(rows[0])  # alike, so that passes are cut often
    rules = Rules(
        multiple=rng.choice([1, 1, 2, 3, 8]),
        pad="max",
        cut=rng.random() < 0.9,
        cut_prefill=rng.choice([2, 8, 512]),
        cut_decode=rng.choice([2, 4, 32]),
    )
    return rows, [rng.random() < 0.95 for _ in rows], rules


@pytest.mark.parametrize("passes", [20_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_equal_to_the_transcription(passes: int) -> None:
    """V1 to V10 and S3, S4, S8: on random passes."""
    rng = random.Random(0)
    cuts = 0
    for _ in range(passes):
        rows, allowed, rules = drawn(rng)
        votes = [vote(counts, rules, allow_cut=allow) for counts, allow in zip(rows, allowed, strict=True)]
        found = coordinate(votes, rules)
        ranks = [
            Rank(counts, sum(counts), each.padded, allow)
            for counts, each, allow in zip(rows, votes, allowed, strict=True)
        ]
        expected = transcribed(ranks, rules)
        if found is None:
            assert expected == [(None, None)]
            continue
        for counts, (wanted, padded) in zip(rows, expected, strict=True):
            assert padded == [found.padded] * len(rows)
            assert (wanted is not None) == (found.cut > 0)
            if wanted is not None:
                assert as_slices(halves(counts, found.cut)) == wanted
                cuts += 1
        gathered = synced([{"tokens": sum(counts), "mode": "EXTEND" if counts else "IDLE"} for counts in rows], rules)
        assert list(found.tokens) == gathered["global_num_tokens"]
        assert found.padded == gathered["max_len"]
        assert found.idle != gathered["runs"]
        assert [tokens == 0 and not found.idle for tokens in found.tokens] == gathered["idle_batch"]
    assert cuts > passes // 10


votes_of = st.builds(
    lambda tokens, more, wishes, mode: Vote(tokens, tokens + more, wishes and tokens > 0, mode),
    st.integers(0, 3000) | st.integers(0, 4),
    st.integers(0, 8),
    st.booleans(),
    st.integers(0, 2),
)
several = st.lists(votes_of, min_size=2, max_size=8)
rules_of = st.builds(Rules, pad=st.sampled_from(["none", "max"]), cut=st.booleans())


@settings(max_examples=200, deadline=None)
@given(several, rules_of)
def test_order_of_votes_does_not_matter(votes: list[Vote], rules: Rules) -> None:
    """V4: all ranks hold the same columns, whichever is theirs."""
    found = coordinate(votes, rules)
    back = coordinate(votes[::-1], rules)
    assert found is not None
    assert back is not None
    assert (found.padded, found.cut, found.mode) == (back.padded, back.cut, back.mode)
    assert found.tokens == back.tokens[::-1] == tuple(each.tokens for each in votes)


@settings(max_examples=200, deadline=None)
@given(several, rules_of)
def test_bounds(votes: list[Vote], rules: Rules) -> None:
    """V6, V7, V8: padded is the maximum or nothing; a cut leaves tokens in both halves of every replica."""
    found = coordinate(votes, rules)
    assert found is not None
    longest = max(each.padded for each in votes)
    assert found.padded in ((longest,) if rules.pad == "max" else (0, longest))
    if found.cut:
        assert rules.cut
        assert all(each.wishes for each in votes)
        assert 1 <= found.cut < min(found.tokens)
        assert found.padded == longest
    assert found.idle == (max(found.tokens) == 0)


@settings(max_examples=200, deadline=None)
@given(several, st.integers(0, 7))
def test_one_veto(votes: list[Vote], which: int) -> None:
    """V7, V8: a replica that does not wish, is idle or is short prevents the cut, and the padding stays."""
    which %= len(votes)
    before = coordinate(votes, PADDED_CUT)
    assert before is not None
    for changed in (votes[which]._replace(wishes=False), votes[which]._replace(tokens=0)):
        found = coordinate([*votes[:which], changed, *votes[which + 1 :]], PADDED_CUT)
        assert found is not None
        assert (found.cut, found.padded) == (0, before.padded)


@settings(max_examples=200, deadline=None)
@given(several, rules_of)
def test_another_idle_replica(votes: list[Vote], rules: Rules) -> None:
    """S4: it changes the tokens alone, or ends a cut."""
    before = coordinate(votes, rules)
    after = coordinate([*votes, vote((), rules)], rules)
    assert before is not None
    assert after is not None
    assert after.tokens == (*before.tokens, 0)
    assert after.cut == 0
    assert after.mode == before.mode
    if not before.cut:
        assert after.padded == before.padded


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_halves_partition_the_rows(counts: list[int], data: st.DataObject) -> None:
    """V9: both halves have tokens, in the order of the rows, and every token once."""
    if sum(counts) < 2:
        with pytest.raises(ValueError, match="cannot be cut"):
            halves(counts, 1)
        return
    cut = data.draw(st.integers(1, sum(counts) - 1))
    first, second = halves(counts, cut)
    assert sum(part.count for part in first) == cut
    tokens = [(part.row, part.first + index) for part in (*first, *second) for index in range(part.count)]
    assert tokens == [(row, index) for row, count in enumerate(counts) for index in range(count)]
    assert all(part.count > 0 for part in (*first, *second))
    assert second


def test_v1_one_replica_agrees_on_nothing() -> None:
    """V1"""
    assert coordinate([Vote(700, 704, True)], PADDED_CUT) is None


@pytest.mark.parametrize(("rows", "threshold"), [("decode", 32), ("prefill", 512)])
def test_v2_thresholds(rows: str, threshold: int) -> None:
    """V2: the wish begins at the threshold of its kind; never during warm-up, nor with the feature off."""

    def counts(tokens: int) -> list[int]:
        return [1] * tokens if rows == "decode" else [tokens - 2, 2]

    assert [vote(counts(threshold + off), CUT).wishes for off in (-1, 0, 1)] == [False, True, True]
    assert not vote(counts(threshold), CUT, allow_cut=False).wishes
    assert not vote(counts(10_000), Rules()).wishes


def test_v2_one_long_row_among_decoding_ones_is_prefill() -> None:
    """V2: uniform decoding means that every row has one token."""
    assert vote([1] * 32, CUT).wishes
    assert not vote([1] * 31 + [2], CUT).wishes


@pytest.mark.parametrize("field", ["cut_prefill", "cut_decode"])
def test_v2_thresholds_below_two_are_refused(field: str) -> None:
    """V2: a half needs a token."""
    assert Rules(**{field: 2})
    with pytest.raises(ConfigError, match="at least 2"):
        Rules(**{field: 1})


def test_v3_padded_below_tokens() -> None:
    """V3"""
    with pytest.raises(ValueError, match="replica 1 has 5 tokens and pads them to 4"):
        coordinate([Vote(5, 8, False), Vote(5, 4, False)], Rules())
    with pytest.raises(ValueError, match="no vote"):
        coordinate([], Rules())


def test_v4_all_columns_reach_all_ranks() -> None:
    """V4 and S2: the counts of every replica are in the agreement, also of those that wish nothing."""
    votes = [Vote(5, 5, False), Vote(0, 0, False), Vote(7, 7, True)]
    assert {coordinate(list(order), Rules()) for order in permutations(votes)} == {
        Agreement(tuple(each.tokens for each in order)) for order in permutations(votes)
    }


def test_v5_no_device_is_asked() -> None:
    """V5: counts and agreement are plain integers, so nothing waits for a device."""
    found = coordinate([vote([4], Rules()), vote([1, 1], Rules())], Rules(pad="max"))
    assert found is not None
    assert all(type(value) is int for value in (*found.tokens, found.padded, found.cut, found.mode))


def test_v6_padding_to_the_maximum() -> None:
    """V6: also where nothing is cut; without the rule, only where it is."""
    votes = [vote([1], PADDED_CUT), vote([1000], PADDED_CUT)]
    assert coordinate(votes, PADDED_CUT) == Agreement((1, 1000), padded=1000)
    assert coordinate(votes, CUT) == Agreement((1, 1000))
    alike = [vote([600], CUT)] * 2
    assert coordinate(alike, CUT) == Agreement((600, 600), padded=600, cut=300)


def test_v7_all_or_none() -> None:
    """V7"""
    assert coordinate([vote([600], CUT), vote([500], CUT)], CUT) == Agreement((600, 500))
    assert coordinate([vote([600], CUT), vote([512], CUT)], CUT) == Agreement((600, 512), padded=600, cut=300)


@pytest.mark.parametrize("tokens", [300, 301])
def test_v8_no_empty_second_half(tokens: int) -> None:
    """V8: a replica of padded // 2 tokens prevents the cut, one of a token more does not."""
    rules = Rules(cut=True, cut_prefill=100, pad="max")
    found = coordinate([vote([600], rules), vote([tokens], rules)], rules)
    assert found == Agreement((600, tokens), padded=600, cut=0 if tokens == 300 else 300)


def test_v9_where_to_cut() -> None:
    """V9: half of the padded count; at a row's edge, inside a row, with rows of one token, with an odd count."""
    rules = Rules(cut=True, cut_prefill=2, multiple=4)
    found = coordinate([vote([5, 4], rules), vote([9], rules)], rules)
    assert found == Agreement((9, 9), padded=12, cut=6)
    assert halves([5, 4], 6) == ([RowPart(0, 0, 5), RowPart(1, 0, 1)], [RowPart(1, 1, 3)])
    assert halves([6, 4], 6) == ([RowPart(0, 0, 6)], [RowPart(1, 0, 4)])
    assert halves([5, 1, 3], 5) == ([RowPart(0, 0, 5)], [RowPart(1, 0, 1), RowPart(2, 0, 3)])
    assert halves([1, 1], 1) == ([RowPart(0, 0, 1)], [RowPart(1, 0, 1)])
    odd = Rules(cut=True, cut_prefill=2)
    assert coordinate([vote([7], odd), vote([7], odd)], odd) == Agreement((7, 7), padded=7, cut=3)


def test_v10_what_is_returned() -> None:
    """V10: counts without a cut, and with one."""
    assert coordinate([vote([3], PADDED_CUT)] * 2, PADDED_CUT) == Agreement((3, 3), padded=3)
    found = coordinate([vote([512], PADDED_CUT)] * 2, PADDED_CUT)
    assert found == Agreement((512, 512), padded=512, cut=256)


def test_s3_the_least_mode_counts() -> None:
    """S3: idle replicas have no say in it; a mode above 0 pads."""
    assert coordinate([Vote(4, 4, False, 1), Vote(3, 3, False, 0)], Rules()) == Agreement((4, 3))
    assert coordinate([Vote(4, 4, False, 1), Vote(3, 3, False, 2)], Rules()) == Agreement((4, 3), padded=4, mode=1)
    assert coordinate([Vote(4, 4, False, 2), Vote(0, 0, False)], Rules()) == Agreement((4, 0), padded=4, mode=2)


def test_s4_idle_replicas() -> None:
    """S4: with any token the pass is run by all; without one there is none."""
    busy = coordinate([vote([], CUT), vote([2000], CUT), vote([], CUT)], CUT)
    assert busy == Agreement((0, 2000, 0))
    assert not busy.idle
    nothing = coordinate([vote([], CUT)] * 3, CUT)
    assert nothing == Agreement((0, 0, 0))
    assert nothing.idle


def test_s5_all_counts_travel() -> None:
    """S5 has no counterpart: the counts of all replicas are kept whatever the exchange."""
    found = coordinate([vote([3], Rules()), vote([5], Rules())], Rules())
    assert found is not None
    assert found.tokens == (3, 5)


@pytest.mark.parametrize(("tokens", "padded"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_s8_counts_are_rounded_up_to_the_tensor_parallel_degree(tokens: int, padded: int) -> None:
    """S8"""
    assert vote([tokens] if tokens else [], Rules(multiple=4)) == Vote(tokens, padded, False)
