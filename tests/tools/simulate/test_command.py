"""The command headrace simulate: the table, JSON, the picture, mistakes in one line."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.cli import commands as cli
from headrace.core.config import SchedulerConfig
from headrace.tools.output import quantile
from headrace.tools.simulate import options, plot
from headrace.tools.simulate.objectives import OBJECTIVES
from headrace.tools.simulate.replay.replay import ReplayOutcome, ReplayResult
from headrace.tools.simulate.summary import Latency, summarise

COST = "1e-9,1e-4,0.01"
ENGINE = ("--cost", COST, "--page-size", "64", "--kv-pages", "128")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{0.2 * number},{500 + 100 * (number % 30)},{number % 7}" for number in range(60)]
    rows += ["12.5,5000,", "13,400,"]
    path.write_text("\n".join(["arrival_s,input_tokens,session", *rows]))
    return path


def report(trace: Path, *flags: str) -> dict[str, Any]:
    out = trace.parent / "out.json"
    assert cli.main(["simulate", str(trace), *ENGINE, "--json", str(out), *flags]) == 0
    found: dict[str, Any] = json.loads(out.read_bytes())
    return found


def test_a_sweep_has_a_line_for_every_combination(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(trace, "--load", "0.5,1.5", "--chunk-tokens", "256,1024", "--replicas", "1..2")
    out, err = capsys.readouterr()
    assert err == "", "progress is for terminals"
    title, _, _, header, *lines = out.splitlines()
    assert title.startswith("trace.csv: 62 requests, ")
    assert "cost 1e-9,1e-4,0.01: 1e-09 l² + 0.0001 l + 0.01 s; objective prop" in title
    assert header.split()[:3] == ["load", "chunk-tokens", "replicas"]
    assert [line.split()[:3] for line in lines] == [
        [load, chunk, replicas] for chunk in ("256", "1024") for replicas in "12" for load in ("0.50", "1.50")
    ]
    assert len({len(line) for line in (header, *lines)}) == 1, "columns are aligned"
    assert [row["load"] for row in found["rows"]] == pytest.approx([0.5, 1.5] * 4)
    by = {(row["load"] > 1, row["replicas"], row["chunk_tokens"]): row["summary"] for row in found["rows"]}
    for chunk in (256, 1024):
        assert by[True, 1, chunk]["mean_s"] > by[True, 2, chunk]["mean_s"], "two servers at most wait as long"
        assert by[True, 1, chunk]["utilisation"] > by[False, 1, chunk]["utilisation"]


def test_tenants_have_a_goodput_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One tenant floods the server: under srpt, with its limit of lag, the other's prompts come before its own."""
    path = tmp_path / "trace.csv"
    rows = [f"{0.01 * number},2000,flood" for number in range(200)] + [f"{number},4000,calm" for number in range(10)]
    path.write_text("\n".join(["arrival_s,input_tokens,tenant", *rows]))
    fcfs, srpt = report(path, "--policy", "fcfs,srpt", "--tenant-lag-s", "1", "--max-queued-tokens", "1000000")["rows"]
    assert list(srpt["summary"]["tenants"]) == ["flood", "calm"]
    assert fcfs["summary"]["tenants"]["calm"] < 0.5
    assert srpt["summary"]["tenants"]["calm"] == 1.0
    table = capsys.readouterr().out.split("Goodput by tenant")[1]
    assert table.splitlines()[2].split() == ["load", "policy", "flood", "calm"]
    assert table.splitlines()[4].split()[1:] == ["srpt", f"{100 * srpt['summary']['tenants']['flood']:.1f}", "100.0"]


def test_returns_have_hits_and_times_by_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each session has a second turn, behind the answer to the first one."""
    path = tmp_path / "trace.csv"
    turns = [f"{20 * turn + number},{640 + 640 * turn},300,{number}" for turn in range(2) for number in range(10)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens,session", *turns]))
    off, on = report(path, "--remote", "always", "--returns", "off,on", "--fetch-rate", "100000", "--kv-pages", "999")[
        "rows"
    ]
    assert on["summary"]["offers"]["taken"] > 5
    assert off["summary"]["offers"] == {}
    assert on["summary"]["hits"] > off["summary"]["hits"] + 0.05
    assert on["summary"]["turns"]["2"]["mean_s"] < off["summary"]["turns"]["2"]["mean_s"]
    shown = capsys.readouterr().out.split("by turn.")[1].splitlines()[2:]
    assert shown[0].split()[:4] == ["load", "returns", "hits", "engine"]
    assert [line.split()[1] for line in shown[1:]] == ["off", "on"]
    assert shown[2].endswith(f"{on['summary']['offers']['taken']} of {sum(on['summary']['offers'].values())}")


def test_parts_are_replayed_alone_and_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two turns each of twelve sessions, on two prefill servers with one decode server."""
    path = tmp_path / "trace.csv"
    turns = [f"{20 * turn + number},{640 + 640 * turn},90,{number}" for turn in range(2) for number in range(12)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens,session", *turns]))
    flags = ("--remote", "always", "--replicas", "2", "--fetch-rate", "20000", "--chunk-tokens", "256")
    rows = report(path, *flags, "--parts", "none,open,all")["rows"]
    assert [row["swept"] for row in rows] == [{"parts": name} for name in ("none", "open", "all")]
    none, opened, everything = (row["summary"] for row in rows)
    assert opened["turns"]["2 and later"] == opened["turns"]["2"]
    for some in (opened, everything):
        assert some["hits"] > none["hits"] + 0.1
        assert some["turns"]["2"]["mean_s"] < 0.7 * none["turns"]["2"]["mean_s"]
    assert (none["offers"], sum(everything["offers"].values()) > 5) == ({}, True)
    header, *lines = capsys.readouterr().out.split("by turn.")[1].splitlines()[2:]
    assert "turn 2 and later, mean P99" in header
    assert [line.split()[1] for line in lines] == ["none", "open", "all"]


def test_parts_without_decode_servers(trace: Path) -> None:
    rows = report(trace, "--parts", "none,hints,siblings,open", "--hints", "oracle", "--load", "0.5")["rows"]
    assert {row["summary"]["decode"] for row in rows} == {None}
    found = {row["swept"]["parts"]: row["summary"] for row in rows}
    assert found["siblings"] == found["none"], "one server has no siblings"
    assert found["open"]["turns"]["2 and later"]["mean_s"] < found["none"]["turns"]["2 and later"]["mean_s"]


def test_without_a_load_the_times_are_those_of_the_trace(trace: Path) -> None:
    (row,) = report(trace)["rows"]
    assert 13 < row["summary"]["seconds"] < 16, "the last prompt comes after 13 s"
    assert 0 < row["load"] < 2
    assert row["summary"]["refused"] == {}
    assert row["summary"]["hits"] > 0


def test_limit_objective_and_flags_of_the_server(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("max-queued-tokens = 3000\nprefix-cache = false\n")
    flags = ("--limit", "40", "--config", str(config), "--load", "3", "--objective", "flat")
    found = report(trace, *flags)
    (row,) = found["rows"]
    assert (found["requests"], found["objective"]) == (40, "flat")
    assert row["summary"]["refused"]["queue_full"] > 5
    assert row["summary"]["hits"] == 0
    assert row["summary"]["goodput"] == pytest.approx(1 - row["summary"]["refused"]["queue_full"] / 40)


def test_the_preset_brings_its_pool(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = trace.parent / "out.json"
    assert cli.main(["simulate", str(trace), "--json", str(out)]) == 0
    (row,) = json.loads(out.read_bytes())["rows"]
    assert (row["kv_pages"], row["page_size"]) == (2700, 512)
    assert "preset llama-3-70b-8xh100" in capsys.readouterr().out


def test_slow_peers_hold_pages(trace: Path) -> None:
    at_once, slow = (report(trace, *flags)["rows"][0] for flags in ((), ("--fetch-rate", "6000")))
    assert slow["summary"]["mean_s"] > 2 * at_once["summary"]["mean_s"]


def test_every_policy_of_the_scheduler_is_a_choice() -> None:
    policies = next(setting for setting in options.REPLAYED if setting.key == "policy")
    assert SchedulerConfig().policy in policies.choices


def test_a_picture(trace: Path) -> None:
    path = trace.parent / "out.png"
    report(trace, "--load", "0.5,1", "--chunk-tokens", "256,512", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_the_axes_of_a_picture_show(trace: Path) -> None:
    from msgspec import convert

    from headrace.tools.simulate.report import ReplayReport

    def axes(*flags: str) -> tuple[str, dict[str, list[float]]]:
        name, series = plot.split(convert(report(trace, *flags), ReplayReport).rows)
        return name, {label: [round(at, 3) for at, _ in points] for label, points in series.items()}

    assert axes("--load", "1,0.5", "--replicas", "1,2") == (
        "load",
        {"replicas 1": [0.5, 1.0], "replicas 2": [0.5, 1.0]},
    )
    assert axes("--load", "1", "--replicas", "3,2") == ("replicas", {"": [2, 3]})
    assert axes("--chunking", "fixed,dynamic", "--load", "2")[1] == {"chunking fixed": [2], "chunking dynamic": [2]}


MISTAKES = [
    (["--load", "0"], "--load: expected numbers above 0, separated by commas, got '0'"),
    (["--load", "1,x"], "--load: expected numbers above 0"),
    (["--load", "1,1.0"], "--load: a value is given twice"),
    (["--replicas", "0"], "--replicas: expected whole numbers from 1 to 1024, or a range such as 1..4, got '0'"),
    (["--replicas", "4..2"], "--replicas: the range 4..2 is empty"),
    (["--router", "nearest"], "--router: expected one of score, prefix-affinity, least-loaded, got 'nearest'"),
    (["--returns", "on"], "--returns is for decode servers that compute no prompt; add --remote always"),
    (["--returns", "on", "--remote", "always,never"], "--returns is for decode servers that compute no prompt"),
    (["--returns", "yes", "--remote", "always"], "--returns: expected one of on, off, got 'yes'"),
    (["--open", "always"], "--open: expected one of on, off, cancel, got 'always'"),
    (
        ["--open", "on", "--remote", "cost"],
        "--open is for decode servers that compute no prompt; leave --remote out or",
    ),
    (["--hedge", "0.5"], "--hedge: expected 0, or numbers from 1, separated by commas, got '0.5'"),
    (["--hedge", "2", "--router", "least-loaded"], "--hedge is replayed with --router score"),
    (["--parts", "none,some"], "--parts: expected one of none, hints, returns, siblings, open, all, got 'some'"),
    (["--parts", "none,all"], "--parts returns and all are for decode servers that compute no prompt; add --remote"),
    (["--parts", "none", "--remote", "never"], "--parts is for decode servers that compute no prompt"),
    (["--parts", "none", "--siblings", "on"], "--parts says where --siblings is on; leave --siblings out"),
    (["--limit", "none"], "--limit: expected a whole number, at least 1, got 'none'"),
    (["--host-rate", "0"], "--host-rate: expected a number above 0, got '0'"),
    (["--fetch-rate", "-3"], "--fetch-rate: expected a number above 0, got '-3'"),
    (["--objective", "mine"], "--objective: expected one of prop, class, flat, got 'mine'"),
    (["--cost", "1,2"], "--cost: expected three numbers of seconds such as 3.3e-10,35.7e-6,8e-3, got '1,2'"),
    (["--cost", "0,0,0"], "--cost: expected three numbers"),
    (["--cost", "1,1,nan"], "--cost: expected three numbers"),
    (["--cost", "1,1,1", "--preset", "x"], "not allowed with argument"),
    (["--cost", "0,0.1,0"], "--kv-pages is needed beside --cost"),
    (["--preset", "gpt"], "--preset: expected one of llama-3-70b-8xh100, got 'gpt'"),
    (["--policy", "fcfs,lifo"], "--policy: expected one of srpt, fcfs, slo"),
    (["--chunk-tokens", "512,-1"], "--chunk-tokens: expected a whole number, at least 0, got '-1'"),
    (["--plot", "x.svg"], "--plot: expected a file name that ends in .png, got 'x.svg'"),
    (["--json", "/nowhere/x.json"], "--json: /nowhere/x.json is in no folder that exists"),
    (["--json", "/"], "--json: / is a folder"),
    (["--lod", "1"], "unknown argument --lod; did you mean --load?"),
    (["--calibrate", "http://127.0.0.1:9"], "--calibrate: no answer from http://127.0.0.1:9"),
    (["--calibrate", "nowhere"], "--calibrate: no answer from nowhere"),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES, ids=lambda value: " ".join(value)[:40])
def test_mistakes_are_one_line_and_status_2(
    flags: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", str(trace), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_trace_of_one_moment_has_no_load(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text("arrival_s,input_tokens\n3,50\n3,60\n")
    assert cli.main(["simulate", str(trace), "--load", "1"]) == 2
    assert "--load needs requests at different times" in capsys.readouterr().err
    assert cli.main(["simulate", str(trace)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "-"


def test_without_matplotlib_the_mistake_is_said_before_anything_runs(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> ModuleType | None:
        assert name == "matplotlib"
        return None

    monkeypatch.setattr("headrace.tools.output.find_spec", missing)
    assert cli.main(["simulate", str(trace), "--plot", "x.png"]) == 2
    assert capsys.readouterr().err == "headrace: --plot needs matplotlib: pip install 'headrace[plot]'\n"


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_progress_on_a_terminal_is_one_line_that_goes_away(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    report(trace, "--load", "1,2")
    assert "\n" not in terminal.text
    assert "replay 2 of 2: " in terminal.text
    assert terminal.text.endswith("\r\x1b[K")


def test_refusals_and_retries_are_in_the_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At twice what one server can do, objectives refuse; some of the refused get in when they come again."""
    flags = ("--load", "2", "--policy", "fcfs", "--send-objective")
    (once,) = report(trace, *flags)["rows"]
    assert "1st retry" not in capsys.readouterr().out
    assert once["summary"]["refused"].keys() == {"slo_unreachable"}
    assert (once["summary"]["retried"], once["summary"]["first_retry_accepted"]) == (0, None)
    found = report(trace, *flags, "--retries", "2")
    *_, header, line = capsys.readouterr().out.splitlines()
    assert header.split()[-3:] == ["retried", "1st", "retry"]
    summary = found["rows"][0]["summary"]
    assert summary["retried"] >= once["summary"]["refused"]["slo_unreachable"] > 5
    assert line.split()[-2:] == [str(summary["retried"]), f"{100 * summary['first_retry_accepted']:.1f}"]
    assert sum(summary["refused"].values()) < sum(once["summary"]["refused"].values())
    (ordered,) = report(trace, *flags, "--no-refuse-unreachable")["rows"]
    assert not ordered["summary"]["refused"]


def test_promises_have_their_columns_and_a_picture(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{0.4 * number},{50 + 40 * (number % 7)}\n" for number in range(60))
    trace.write_text("arrival_s,input_tokens\n" + rows)
    picture = trace.parent / "promises.png"
    (row,) = report(trace, "--promise", "p90", "--load", "0.8", "--plot", str(picture))["rows"]
    promises = row["summary"]["promises"]
    assert row["promise"] == 0.9
    everything = promises["classes"]["all"]
    assert everything["promised"] == len(promises["points"]) > 30
    within = [ttft <= bound for _, _, bound, ttft in promises["points"]]
    assert everything["kept"] == pytest.approx(sum(within) / len(within))
    header, figures = capsys.readouterr().out.splitlines()[-2:]
    assert "promised" in header
    assert f"{100 * everything['kept']:.2f}" in figures.split()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_share_of_first_retries_is_of_those_that_came_again() -> None:
    attempts = [("", 1), ("", 2), ("", 2), ("", 3), ("slo_unreachable", 2), ("slo_unreachable", 1)]
    outcomes = tuple(ReplayOutcome(100, 0.0, 0, None if error else 1.0, 0, error, tries) for error, tries in attempts)
    found = summarise(ReplayResult(outcomes, (1.0,), 1.0, 1), OBJECTIVES["flat"], (0.0, 0.001, 0.0))
    assert (found.retried, found.first_retry_accepted) == (4, 0.5)


def test_figures_of_a_replay() -> None:
    """Three short prompts, of which one is refused, and a mid one; a server of two is idle."""
    outcomes = (
        ReplayOutcome(100, 0.0, 0, 1.0, 64),
        ReplayOutcome(200, 0.0, 0, 3.0, 0),
        ReplayOutcome(300, 0.0, 0, None, 0, "queue_full"),
        ReplayOutcome(5000, 0.0, 0, 8.5, 1000),
    )
    found = summarise(ReplayResult(outcomes, (5.0, 0.0), 10.0, 7), OBJECTIVES["class"], (0.0, 0.001, 0.0))
    assert found.ttft["short"] == Latency(3, 2.0, pytest.approx(2.98))
    assert found.ttft["long"] == Latency(0, None, None)
    assert found.ttft["all"].requests == 4
    assert (found.goodput, found.goodput_tokens) == (0.25, 100 / 5600)
    assert (found.longest_s, found.mean_s) == (8.5, pytest.approx(12.5 / 3))
    assert (found.refused, found.utilisation, found.tokens_per_s) == ({"queue_full": 1}, 0.25, 530.0)
    assert found.hits == pytest.approx(1064 / 5600)
    prop = OBJECTIVES["prop"](5000, (1e-8, 0.001, 9.0))
    assert prop == pytest.approx(1 + 5 * (1e-8 * 5000**2 + 5))
    assert OBJECTIVES["flat"](5000, (0.0, 0.0, 0.0)) == 30


def test_quantiles_are_interpolated() -> None:
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0, 0.25, 0.5, 1)] == [1.0, 1.5, 2.0, 4.0]
    assert quantile([], 0.5) is None
