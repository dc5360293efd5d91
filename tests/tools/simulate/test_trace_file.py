"""Traces: both formats, arrival times in steps, bad lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.core.types.errors import ConfigError
from headrace.tools.simulate.replay.workload import TraceRequest, prompt
from headrace.tools.simulate.trace_file import read_trace


def line(timestamp: float, tokens: int, *ids: int, **fields: Any) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": tokens, "output_length": 7, "hash_ids": ids} | fields)


def mooncake(folder: Path, *lines: str) -> list[TraceRequest]:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return read_trace(path)


def comma(folder: Path, text: str) -> list[TraceRequest]:
    path = folder / "trace.CSV"
    path.write_text(text)
    return read_trace(path)


def common(one: TraceRequest, other: TraceRequest) -> int:
    """Leading tokens that two prompts share."""
    ids = [memoryview(prompt(request)).cast("i").tolist() for request in (one, other)]
    return next((n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))


def test_blocks_of_equal_ids_are_equal_tokens(tmp_path: Path) -> None:
    first, second = mooncake(tmp_path, line(0, 1100, 0, 1, 2), line(10, 1600, 0, 1, 3, 4), "")
    assert (first.tokens, first.output_tokens, len(prompt(first))) == (1100, 7, 4 * 1100)
    assert common(first, second) == 1024


def test_both_formats_say_whose_a_request_is(tmp_path: Path) -> None:
    lines = mooncake(tmp_path, line(0, 10, 0, tenant="acme"), line(1, 10, 0))
    rows = comma(tmp_path, "arrival_s,input_tokens,tenant\n0,10,acme\n1,10,")
    assert [request.tenant for request in (*lines, *rows)] == ["acme", "", "acme", ""]


def test_requests_of_a_coarse_step_are_spread_evenly_inside_it(tmp_path: Path) -> None:
    """As in Mooncake's traces, whose steps are of 3 s or a millisecond less. A longer gap stays a gap."""
    steps = [3000, 3000, 3000, 5999, 9000, 9000, 30000, 30000]
    found = mooncake(tmp_path, *(line(at, 10, number) for number, at in enumerate(steps)))
    assert [request.arrival_s for request in found] == pytest.approx([0, 1, 2, 2.999, 6, 7.5, 27, 28.5], abs=1.1e-3)


@pytest.mark.parametrize("steps", [[0, 1, 1, 500, 900], [0, 0, 0]])
def test_exact_times_stay_as_they_are(steps: list[int], tmp_path: Path) -> None:
    found = mooncake(tmp_path, *(line(at, 10, number) for number, at in enumerate(steps)))
    assert [request.arrival_s for request in found] == [at / 1000 for at in steps]


def test_a_trace_is_sorted_begins_at_zero_and_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join((line(900, 30, 3), line(500, 10, 1), line(700, 20, 2))))
    found = read_trace(path, 2)
    assert [(request.arrival_s, request.tokens) for request in found] == [(0.0, 10), (pytest.approx(0.2), 20)]


CSV = """arrival_s, input_tokens, output_tokens, session, prefix_group, prefix_tokens
2.5,300,5,alice,bot,100
2.5,700,5,alice,bot,100
4,80,,bob,bot,100
1.25,300,5,alice,,
6,300,1,,,
6,300,1,,,
"""


def test_csv_with_sessions_and_common_prefixes(tmp_path: Path) -> None:
    alone, first, second, bob, one, other = comma(tmp_path, CSV)
    assert [request.arrival_s for request in (alone, first, second, bob, one)] == [0, 1.25, 1.25, 2.75, 4.75]
    assert common(first, second) == 300
    assert common(first, bob) == 80, "all of a prompt that is shorter than the prefix"
    assert common(alone, first) == 0
    assert common(one, other) == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: Input data was truncated"),
        ([line(0, 5, 1), "[]"], "line 2: Expected `object`, got `array`"),
        ([line(0, 5, 1), line(0, 0)], "line 2: Expected `int` >= 1 - at `$.input_length`"),
        ([line(0, 5, 1), '{"timestamp": 3}'], "line 2: Object missing required field `input_length`"),
        ([line(-1, 5, 1)], "line 1: Expected `float` >= 0.0 - at `$.timestamp`"),
        ([line(0, 5, 1), "", line(0, 513, 1)], "line 3: 513 tokens are 2 blocks of 512, found 1 hash_ids"),
        ([line(0, 5, -1)], "line 1: Expected `int` >= 0 - at `$.hash_ids"),
        ([""], "trace.jsonl has no requests"),
    ],
)
def test_bad_lines_are_named(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        mooncake(tmp_path, *lines)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


HEADER = "arrival_s,input_tokens,session,prefix_group,prefix_tokens\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the header has to name arrival_s and input_tokens; arrival_s is missing"),
        ("arrival_s,tokens\n", "line 1: the header has to name arrival_s and input_tokens; input_tokens is missing"),
        (
            "arrival_s,input_tokens,priority\n",
            "line 1: there is no column 'priority'; there are arrival_s, input_tokens",
        ),
        (HEADER, "has no requests"),
        (HEADER + "1,5,,,\nsoon,5,,,\n", "line 3: arrival_s has to be a number of seconds, at least 0, found 'soon'"),
        (HEADER + "-1,5,,,\n", "line 2: arrival_s has to be"),
        (HEADER + "nan,5,,,\n", "line 2: arrival_s has to be"),
        (HEADER + "1,0,,,\n", "line 2: input_tokens has to be a whole number from 1 to 16000000, found '0'"),
        (HEADER + "1,1.5,,,\n", "found '1.5'"),
        (HEADER + "1\n", "line 2: input_tokens has to be a whole number from 1 to 16000000, found ''"),
        (HEADER + "1,5,a,g,\n", "line 2: prefix_group needs prefix_tokens beside it"),
        (HEADER + "1,5,a,,3\n", "line 2: prefix_tokens needs prefix_group beside it"),
        (HEADER + "1,5,a,,,,9\n", "line 2: it has more values than the header has columns"),
    ],
)
def test_bad_csv_lines_are_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        comma(tmp_path, text)
    assert message in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"x\.jsonl is no text in UTF-8"):
        read_trace(tmp_path / "x.jsonl")
