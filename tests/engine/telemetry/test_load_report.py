"""How far a rank says that it is with loading."""

import logging
from collections.abc import Callable

import pytest

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.stage_events import StageLoading
from headrace.core.runtime.clock import VirtualClock
from headrace.core.runtime.progress import LoadProgress
from headrace.engine.kv.memory_plan import weight_count
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.sharding import part_of
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.runner import ModelRunner
from headrace.engine.telemetry.load_report import LoadingReport
from tests.engine.models import Saved

GIB = 1 << 30


def test_share_and_time_left_follow_what_was_read(caplog: pytest.LogCaptureFixture) -> None:
    clock, progress, sent = VirtualClock(100.0), LoadProgress(), list[StageLoading]()
    report = LoadingReport(progress, sent.append, clock, rank=2, epoch=3)
    progress.begin(1000, 8 * GIB)
    with caplog.at_level(logging.INFO):
        for _ in range(8):
            report.report(clock.now())
            clock.advance(1.0)
            progress.read(100)
        progress.read(900)  # parts of tensors count as a whole
        report.report(clock.now())
        progress.end()
        report.report(clock.now())
    assert {(state.stage, state.epoch, state.total_bytes) for state in sent} == {(2, 3, 8 * GIB)}
    assert [state.done_bytes / GIB for state in sent[:4]] == pytest.approx([0, 0.8, 1.6, 2.4])
    assert [state.left_s for state in sent[:4]] == pytest.approx([None, 9.0, 8.0, 7.0])
    assert str(sent[0]) == "reads weights: 0.0 of 8.0 GiB (0%)"
    assert str(sent[4]) == "reads weights: 3.2 of 8.0 GiB (40%, 6 s left)"
    assert str(sent[8]) == "reads weights: 8.0 of 8.0 GiB (100%, 0 s left)"
    assert str(sent[9]) == "warms up"
    assert caplog.messages == ["reads weights: 4.0 of 8.0 GiB (50%, 5 s left)"], "one every five seconds"


def test_the_thread_reports_until_its_context_ends() -> None:
    progress, sent = LoadProgress(), list[StageLoading]()
    report = LoadingReport(progress, sent.append, VirtualClock(), rank=0, epoch=0, period_s=0.001)
    with report:
        while_unknown = len(sent)
        progress.begin(10, 100)
        while len(sent) < 3:
            pass
    assert while_unknown == 0, "nothing is known before the weights are counted"
    reported = len(sent)
    progress.read(5)
    assert len(sent) == reported


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_all_weights_of_a_model_are_counted_once(saved: Callable[[str], Saved], name: str, quantize: str) -> None:
    folder, progress = str(saved(name).folder), LoadProgress()
    counts: list[int] = []
    progress.read = counts.append  # type: ignore[method-assign]
    model = ModelConfig(model=folder, device="cpu", dtype="float32", quantize=quantize)  # type: ignore[arg-type]
    ModelRunner(plan_rank(model, EngineConfig(kv_pages=64, threads=1), 64), loading=progress)
    assert sum(counts) == weight_count(part_of(load_spec(resolve_source(folder))))
    assert progress.loaded
    assert progress.total_bytes > 0
