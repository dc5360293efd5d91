"""headrace replay FILE picture: what is drawn is what was, on one page without other hosts, or as a PNG."""

import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from headrace.cli import commands as cli
from headrace.scheduler.recording.file import Recording, read_recording
from headrace.scheduler.requests.phase import ENDED, Phase
from headrace.tools.replay import picture
from headrace.tools.replay.timeline import gather
from tests.tools.replay.tapes import write
from tests.tools.replay.test_check import schedules


@pytest.fixture(params=[0, 1, 4])
def recording(request: pytest.FixtureRequest, tmp_path: Path) -> Recording:
    return read_recording(write(schedules(request.param)[0], tmp_path, every=70))


def test_the_phases_of_a_request_follow_each_other_without_gaps(recording: Recording) -> None:
    timeline, playback = gather(recording)
    assert not playback.differed
    assert len(timeline.lives) >= 12
    for life in timeline.lives:
        assert not set(ENDED) & {span.phase for span in life.phases}
        for before, after in pairwise(life.phases):
            assert before.end == after.start
        if life.phases:
            assert life.phases[0].start == life.arrived
            assert life.phases[-1].end == (timeline.ended if life.ended is None else life.ended)
        if life.first_token is not None:
            assert life.arrived <= life.first_token
    answered = [
        life for life in timeline.lives if life.tokens and Phase.GENERATING in {one.phase for one in life.phases}
    ]
    for life in answered:
        assert life.first_token is not None


def test_passes_of_a_rank_do_not_overlap_and_loads_are_those_of_the_state(recording: Recording) -> None:
    timeline, playback = gather(recording)
    assert timeline.passes
    for rank in timeline.ranks:
        mine = [one for one in timeline.passes if one.rank == rank]
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(mine))
        drawn = picture.busy(timeline, rank, picture.whole(timeline))
        assert sum(one.passes for one in drawn) == len(mine)
        assert sum(one.tokens for one in drawn) == sum(one.tokens for one in mine)
    last, state = timeline.loads[-1], playback.scheduler.state
    assert last.unplanned == state.unplanned
    assert last.leased_pages == sum(replica.cache.leased for replica in state.replicas)
    assert last.used_pages == sum(replica.cache.total - replica.cache.free for replica in state.replicas)


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(tag)
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not {name for name, _ in attrs} & {"src", "href", "onload", "onclick"}

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "title":
            self.titles.append(data)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass


def test_the_page_needs_nothing_else_and_has_a_bar_for_each_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(schedules(3)[0], tmp_path, "a<b>.recording")
    out = tmp_path / "out.html"
    assert cli.main(["replay", str(path), "picture", "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    text = out.read_text(encoding="utf-8")
    page = _Page(text)
    ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + len("</svg>")])  # it is well-formed
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "a&lt;b&gt;.recording" in text
    timeline, _ = gather(read_recording(path))
    drawn = {title.partition(":")[0] for title in page.titles if ": " in title and " tokens" in title}
    assert {life.rid for life in timeline.lives if life.phases and life.phases[-1].end > life.phases[0].start} <= drawn
    for x, width in re.findall(r'<rect class="bar" x="([\d.-]+)" y="[\d.]+" width="([\d.]+)"', text):
        assert picture.LEFT - 0.1 <= float(x) <= float(x) + float(width) <= picture.WIDTH
    assert page.tags.count("path") == 5


def test_of_many_requests_the_longest_are_drawn(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, _ = gather(recording)
    monkeypatch.setattr(picture, "MOST_BARS", 3)
    drawn, left = picture.bars(timeline, picture.whole(timeline))
    with_phases = [life for life in timeline.lives if life.phases]
    assert (len(drawn), left) == (3, len(with_phases) - 3)
    lengths = sorted(life.phases[-1].end - life.phases[0].start for life in with_phases)
    assert min(picture._length(life) for life in with_phases if life.rid in {bar.name for bar in drawn}) == lengths[-3]
    assert f"Without {left} requests" in picture.as_html(timeline, "x", picture.whole(timeline))


def test_a_window(recording: Recording) -> None:
    """What is drawn lies in it, and all of it is what it was."""
    timeline, _ = gather(recording)
    times = [point.at - timeline.began for point in timeline.loads]
    window = picture.Window(times[len(times) // 4], times[len(times) // 2])
    drawn, _ = picture.bars(timeline, window)
    assert 0 < len(drawn) < len(timeline.lives)
    for bar in drawn:
        assert all(window.start <= start < end <= window.end for _, start, end in bar.spans)
    for rank in timeline.ranks:
        spans = picture.busy(timeline, rank, window)
        assert all(window.start <= one.start <= one.end <= window.end for one in spans)
    text = picture.as_html(timeline, "x", window)
    for x, width in re.findall(r'<rect class="bar" x="([\d.-]+)" y="[\d.]+" width="([\d.]+)"', text):
        assert picture.LEFT - 0.1 <= float(x) <= float(x) + float(width) <= picture.WIDTH


def test_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.PNG"
    assert cli.main(["replay", str(write(schedules(1)[0], tmp_path)), "picture", "-o", str(out)]) == 0
    data = out.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write(schedules(0)[0], tmp_path))
    for output, message in (
        ("x.svg", "expected a file name that ends in .png or .html, got 'x.svg'"),
        (str(tmp_path / "none" / "x.html"), "is in no folder that exists"),
        (str(tmp_path), "is a folder"),
    ):
        assert cli.main(["replay", path, "picture", "-o", output]) == 2
        err = capsys.readouterr().err
        assert err.startswith("headrace: -o: ")
        assert message in err
    missing: dict[str, ModuleType | None] = {"matplotlib": None}
    monkeypatch.setattr("headrace.tools.output.find_spec", missing.get)
    assert cli.main(["replay", path, "picture", "-o", str(tmp_path / "x.png")]) == 2
    assert "pip install 'headrace[plot]'" in capsys.readouterr().err
    assert sys.modules.get("matplotlib", True)
