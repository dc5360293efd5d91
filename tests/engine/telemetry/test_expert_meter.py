"""Rows per expert as a stage reports them."""

from collections.abc import Callable

import msgspec

from headrace.core.messages.stage_events import StageHeartbeat
from headrace.core.stats import Stats
from headrace.core.types.ranks.expert_load import total_rows
from headrace.engine.telemetry.meter import ExpertMeter
from tests.engine.models import Prompt, Saved, make_runner, random_tokens, run_chunks


def test_rows_are_counted_by_layer_from_when_the_stage_is_ready(saved: Callable[[str], Saved]) -> None:
    """Layer 1 of this model is dense; three of eight experts compute each token. Warm-up does not count."""
    runner = make_runner(saved("qwen3-moe").folder)
    runner.warm_up()
    meter = ExpertMeter(3, runner.expert_rows)
    run_chunks(runner, Prompt(1, random_tokens(20), [0, 1], 16).chunks(7))
    load = meter.load()
    assert load is not None
    assert (load.stage, load.layers, load.first) == (3, (0, 2), 0)
    rows = total_rows([load])
    assert [len(counts) for counts in rows.values()] == [8, 8]
    assert [sum(counts) for counts in rows.values()] == [60, 60]
    (sample,) = meter.statistics().samples
    assert (sample.name, sample.value, sample.labels) == ("stage_expert_rows_total", 120.0, ("3",))


def test_dense_models_report_as_they_did(saved: Callable[[str], Saved]) -> None:
    meter = ExpertMeter(0, make_runner(saved("llama").folder).expert_rows)
    assert meter.statistics() == Stats()
    encoded = msgspec.json.encode(StageHeartbeat(stage=0, stats=Stats(), experts=meter.load()))
    assert b"experts" not in encoded
