"""headrace replay FILE why REQUEST: each sentence where its decision was made, on small schedules and random ones."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import commands as cli
from headrace.core.messages.orders import SendChunk
from headrace.core.types.errors import ConfigError
from headrace.core.types.requests.request import SendTo
from headrace.scheduler.recording.file import Recording, read_recording
from headrace.tools.replay import story
from headrace.tools.replay.playback import Playback
from tests.scheduler.bench import Bench
from tests.scheduler.recordings import Tape
from tests.tools.replay.tapes import taped, write
from tests.tools.replay.test_check import schedules


def told(tapes: list[Tape], folder: Path, rid: str) -> list[str]:
    """The sentences, without their times."""
    recording = read_recording(write(tapes[0], folder))
    return [line.partition(" s  ")[2] or line for line in story.tell(Playback(recording), rid).splitlines()]


def has(lines: list[str], pattern: str) -> str:
    """The only sentence that matches."""
    found = [line for line in lines if re.search(pattern, line)]
    assert len(found) == 1, (pattern, lines)
    return found[0]


def test_a_prompt_that_is_handed_over(tmp_path: Path) -> None:
    with taped() as tapes:
        bench = Bench(chunk_tokens=8, policy="fcfs", optimistic_start=False)
        bench.submit("first", 20, route=SendTo("t0"), max_tokens=2)
        bench.submit("late", list(range(100, 124)), route=SendTo("t1"), max_tokens=2, priority=2, tenant="acme")
        bench.join()
        bench.now += 0.5
        bench.reserve("t0", 20)
        bench.now += 0.25
        bench.reserve("t1", 24, generation=2)
        while (forward := bench.plan()) is not None:
            bench.now += 0.1
            bench.done(forward, *[5 for row in forward.rows if row.sample is not None], seconds=0.08)
        bench.now += 0.05
        for send in bench.all(SendChunk):
            bench.ack(send)
    lines = told(tapes, tmp_path, "late")
    assert lines[0] == "late: a prompt of 24 tokens; first token after 1.350 s; finished (handoff) after 1.400 s"
    assert lines[1].startswith("phases: bootstrap 0.750 s, waiting 0.")
    has(
        lines, r"^arrives: 24 tokens, its KV is for the decode server that reserves ticket t1; priority 2, tenant acme$"
    )
    has(lines, r"^it waits: no decode server has reserved ticket t1$")
    has(lines, r"^peer has reserved pages of its own for it$")
    has(lines, r"^it waits to be computed, behind 1 request with 20 tokens left: first \(20\)$")
    over = has(lines, r"by without it")
    assert over.startswith(
        "2 passes go by without it, until 0.850 s, since the passes are full: 8 tokens; computed there: first (16)"
    )
    has(lines, r"^it is started: it gets 6 pages$")
    has(
        lines,
        r"^pass \d+ computes its tokens 0 to 4, beside first \(4\); done 0.100 s later, after 80.0 ms of computing$",
    )
    has(lines, r"^pass \d+ computes its tokens 20 to 24, the last of them, alone; done 0.100 s later")
    has(lines, r"^KV of its tokens 0 to 4 is ordered out to peer as chunk 0; acknowledged 0.\d+ s later$")
    has(lines, r"^its first token is known, 1.350 s after its arrival$")
    has(lines, r"^its prompt is computed: the rest of its KV goes to peer$")
    has(lines, r"^it has finished: all of its KV is at its decode server$")
    assert lines[-1].startswith("it has finished")


def test_pages_that_lack(tmp_path: Path) -> None:
    with taped() as tapes:
        bench = Bench(kv_pages=8, chunk_tokens=32, pipeline_depth=0, prefix_cache=False)
        bench.submit("has", 20, max_tokens=3)
        bench.submit("lacks", list(range(100, 120)), max_tokens=2)
        for token in (1, 2, 3):
            forward = bench.plan()
            assert forward is not None
            bench.now += 0.1
            bench.done(forward, token)
        bench.compute(7, 8)
    lines = told(tapes, tmp_path, "lacks")
    over = has(lines, "by without it")
    assert over.startswith("3 passes go by without it, until ")
    assert "since it needs 5 pages and lacks " in over
    assert over.endswith("computed there: has (22)")
    has(lines, r"^it generates 1 more token by ")
    has(lines, r"^it has finished: as many tokens as it may have$")


def test_a_request_that_is_preempted_says_for_whom(tmp_path: Path) -> None:
    with taped() as tapes:
        bench = Bench(kv_pages=6, chunk_tokens=32, pipeline_depth=0, prefix_cache=False)
        bench.submit("old", 8, max_tokens=30)
        bench.submit("young", list(range(50, 58)), max_tokens=30)
        while not bench.metric("preemptions_total"):
            forward = bench.plan()
            if forward is None:
                break
            bench.now += 0.01
            bench.done(forward, *[3 for row in forward.rows if row.sample is not None])
    lines = told(tapes, tmp_path, "young")
    why = "the pool is full, and of those that decode it has come last"
    has(lines, f"^it gives up its 3 pages, as {why}, and waits again$")
    assert re.match(r"the recording ends; for 0.\d+ s it has been waiting: it needs 4 pages and lacks 2: ", lines[-1])


def test_refused_cancelled_and_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with taped() as tapes:
        bench = Bench(max_queued_tokens=50)
        bench.submit("request-1", 40)
        bench.submit("request-2", 40)
        bench.abort("request-1")
    lines = told(tapes, tmp_path, "request-2")
    assert "refused (queue_full) after 0.000 s" in lines[0]
    has(lines, r"^it is refused: .* \(queue_full, HTTP 429\); it may come again in \d")
    has(told(tapes, tmp_path, "request-1"), "^its client cancels it$")
    has(told(tapes, tmp_path, "request-1"), r"^it has failed: the request was cancelled \(cancelled, HTTP 499\)$")
    path = write(tapes[0], tmp_path)
    assert cli.main(["replay", str(path), "why", "request-3"]) == 2
    err = capsys.readouterr().err
    assert err == "headrace: the recording has no request 'request-3'; near ones: request-2, request-1\n"
    assert cli.main(["replay", str(path), "why", "request-2"]) == 0
    assert capsys.readouterr().out.startswith("request-2: ")


def test_a_beginning_of_an_id_is_enough_where_it_is_one_only(tmp_path: Path) -> None:
    with taped() as tapes:
        bench = Bench()
        for rid in ("cmpl-12ab", "cmpl-77cd"):
            bench.submit(rid)
    recording = read_recording(write(tapes[0], tmp_path))
    assert story.find(recording, "cmpl-7") == "cmpl-77cd"
    with pytest.raises(ConfigError, match="near ones: cmpl-12ab, cmpl-77cd"):
        story.find(recording, "cmpl-")
    with pytest.raises(ConfigError, match="there are 2: cmpl-12ab, cmpl-77cd"):
        story.find(recording, "zzz")


def test_a_request_that_was_here_before(tmp_path: Path) -> None:
    with taped(first=2) as tapes:
        bench = Bench(chunk_tokens=8)
        bench.submit("early", 24, max_tokens=1)
        bench.now += 2.0
        bench.compute(4)
    lines = told(tapes, tmp_path, "early")
    has(
        lines,
        r"^it was here before: it arrived 2.000 s earlier, 0 of 24 tokens are computed; it is waiting since 2.000 s$",
    )
    has(lines, r"^it has finished: as many tokens as it may have$")


def stories(recording: Recording) -> Iterator[tuple[str, list[str]]]:
    names = dict.fromkeys(
        call.event.rid for segment in recording.segments for call in segment.calls if hasattr(call.event, "prompt")
        if hasattr(call.event, "rid")
    )  # fmt: skip
    for rid in names:
        yield rid, story.tell(Playback(recording), story.find(recording, rid)).splitlines()


@pytest.mark.parametrize("seed", [0, 1, 3, 5, 6, 9])
def test_every_request_of_a_random_schedule_has_a_story_in_order(seed: int, tmp_path: Path) -> None:
    """It begins with the arrival, its times rise, and it ends: well, with an error, or with the recording."""
    for tape in schedules(seed):
        for rid, lines in stories(read_recording(write(tape, tmp_path))):
            assert lines[0].startswith(f"{rid}: a prompt of ")
            told = [line for line in lines[1:] if not line.startswith("phases: ")]
            times = [float(line.split(" s  ")[0]) for line in told]
            assert times == sorted(times)
            assert any("arrives: " in line for line in told)
            ends = [
                line for line in told if re.search("it has finished|it has failed|it is refused|recording ends", line)
            ]
            assert ends, lines
