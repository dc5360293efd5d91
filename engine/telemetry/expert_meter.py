"""Load of the experts of a rank: rows that each has computed since the stage was ready."""

from headrace.core.stats import Sample, Stats
from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.engine.layers.expert_rows import ExpertRows


class ExpertMeter:
    """Rows per expert since this meter was made, so that warm-up does not count. Used by the I/O thread; the compute
    thread counts."""

    def __init__(self, stage: int, rows: ExpertRows | None) -> None:
        """stage: pipeline position. rows: the counters of the runner; None for a dense model."""
        self._stage = stage
        self._rows = rows
        self._before = rows.counts() if rows is not None else None

    def load(self) -> ExpertLoad | None:
        """The counts; None for a stage without experts."""
        if self._rows is None or self._before is None:
            return None
        counts = self._rows.counts() - self._before
        return ExpertLoad(
            stage=self._stage, layers=self._rows.layers, first=self._rows.first, rows=counts.astype("<i8").tobytes()
        )

    def statistics(self) -> Stats:
        """Rows that all experts of this rank have computed."""
        if self._rows is None or self._before is None:
            return Stats()
        rows = float((self._rows.counts() - self._before).sum())
        return Stats((Sample("stage_expert_rows_total", rows, (str(self._stage),)),))
