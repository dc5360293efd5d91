"""headrace replay FILE diff: costs come out of the passes, the model repeats what was, other settings differ."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import commands as cli
from headrace.core.config import SchedulerConfig
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import FetchFrom
from headrace.scheduler.costs.chunking import Cost
from headrace.tools.replay.counterfactual import _PromptTexts
from headrace.tools.simulate.replay.decode_server import DecodeTier
from headrace.tools.simulate.replay.workload import TraceRequest, packed_tokens
from tests.scheduler.bench import Bench
from tests.tools.replay.tapes import taped, write
from tests.tools.simulate.replay import replays

COST: Cost = (2e-7, 4e-4, 0.004)


def trace(count: int = 60) -> list[TraceRequest]:
    """Short and long prompts that come faster than they are computed, some of which share a beginning."""
    return [
        replays.request(0.1 * number, 100 + 700 * (number % 4 == 0) + number, 1 + number % 40, generated=6)
        for number in range(count)
    ]


def recorded(requests: Sequence[TraceRequest], folder: Path, **settings: Any) -> Path:
    """The recording of the first scheduler with requests, as an engine with these costs serves them."""
    config: SchedulerConfig = settings.pop("config", replays.config(policy="fcfs"))
    with taped() as tapes:
        replays.replay(requests, config, costs=(COST,), **settings)
    return write(max(tapes, key=lambda tape: len(tape.calls)), folder, every=500)


def diff(path: Path, *flags: str) -> dict[str, Any]:
    out = path.with_suffix(".json")
    assert cli.main(["replay", str(path), "diff", "--json", str(out), *flags]) == 0
    found: dict[str, Any] = json.loads(out.read_bytes())
    return found


def test_the_model_repeats_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = diff(recorded(trace(), tmp_path), "--policy", "srpt", "--replicas", "2")
    (fitted,) = found["fitted"]["costs"]
    assert fitted == pytest.approx(COST, rel=0.02)
    assert found["fitted"]["error"] < 0.01
    was, model, other = found["rows"]
    assert (was["requests"], model["requests"], other["requests"]) == (60, 60, 60)
    for figure in ("mean_s", "p50_s", "p99_s", "queue_s", "busy_s", "hits"):
        assert model[figure] == pytest.approx(was[figure], rel=0.03), figure
    assert other["mean_s"] < 0.7 * was["mean_s"]
    out = capsys.readouterr().out
    assert "which they miss by 0 % (median)" in out
    assert [line.split()[0] for line in out.splitlines() if line[:1].isalpha()][1:4] == [
        "Seconds;",
        "recorded",
        "simulated",
    ]
    assert "\npolicy srpt, replicas 2  " in out
    assert "the model's mean time to first token is equal to the recorded one" in out


def test_without_flags_it_says_how_well_the_model_fits(tmp_path: Path) -> None:
    assert [row["name"] for row in diff(recorded(trace(20), tmp_path))["rows"]] == ["recorded", "simulated"]


def test_lists_are_all_simulated(tmp_path: Path) -> None:
    rows = diff(recorded(trace(20), tmp_path), "--policy", "slo,srpt", "--chunk-tokens", "256")["rows"]
    assert [row["name"] for row in rows[2:]] == ["chunk-tokens 256, policy slo", "chunk-tokens 256, policy srpt"]


def test_a_colocated_server_decodes_in_the_model_too(tmp_path: Path) -> None:
    tier = DecodeTier(remote="never", costs=(COST,), chunk_tokens=512, read_s=2e-6)
    found = diff(recorded(trace(40), tmp_path, decode=tier), "--replicas", "2")
    assert found["decodes"]
    assert found["fitted"]["read_s"] == pytest.approx(2e-6, rel=0.1)
    was, model, other = found["rows"]
    for figure in ("mean_s", "p99_s", "busy_s"):
        assert model[figure] == pytest.approx(was[figure], rel=0.05), figure
    assert other["mean_s"] < was["mean_s"]


def test_a_client_that_gives_up_does_so_in_the_model(tmp_path: Path) -> None:
    requests = [
        TraceRequest(0.0, (replays.request(0.0, 4000, 7).segments), 4000),
        *(
            TraceRequest(0.1, replays.request(0.1, 900, 9 + number).segments, 900, cancel_s=0.05 * (number % 2) or None)
            for number in range(12)
        ),
    ]
    was, model = diff(recorded(requests, tmp_path))["rows"]
    assert was["failed"] == model["failed"] == {"cancelled": 6}
    assert model["mean_s"] == pytest.approx(was["mean_s"], rel=0.03)


def test_recordings_that_say_too_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with taped() as tapes:
        bench = Bench()
        bench.submit("a", 10, max_tokens=1)
        bench.compute(3)
    assert cli.main(["replay", str(write(tapes[0], tmp_path)), "diff"]) == 2
    assert "has 1 passes that were computed; diff fits costs to 8 or more" in capsys.readouterr().err


def test_a_decode_server_computes_nothing_to_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with taped() as tapes:
        bench = Bench()
        bench.prefill_up()
        for number in range(12):
            bench.submit(f"own{number}", [900 + number] * 4, max_tokens=1)
            bench.compute(1)
        for number in range(20):
            bench.submit(f"r{number}", 10, route=FetchFrom("p", f"t{number}"))
    assert cli.main(["replay", str(write(tapes[0], tmp_path)), "diff"]) == 2
    assert "were computed by other servers" in capsys.readouterr().err


def test_prompts_share_as_many_pages_as_they_did() -> None:
    texts = _PromptTexts(4)
    prompts = [
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 9, 9, 9, 9, 1],
        [2, 2, 3],
        [1, 2, 3, 4, 9, 9, 9, 9],
    ]
    made = [packed_tokens(texts.segments(pack(prompt), "")) for prompt in prompts]
    salted = packed_tokens(texts.segments(pack(prompts[0]), "salt"))
    assert [len(one) for one in made] == [4 * len(prompt) for prompt in prompts]

    def shared(left: bytes, right: bytes) -> int:
        pages = range(0, min(len(left), len(right)) // 16 * 16, 16)
        return next((at // 16 for at in pages if left[at : at + 16] != right[at : at + 16]), len(pages))

    for index, prompt in enumerate(prompts):
        for other in range(len(prompts)):
            assert shared(made[index], made[other]) == shared(pack(prompt), pack(prompts[other]))
    assert shared(made[0], salted) == 0
