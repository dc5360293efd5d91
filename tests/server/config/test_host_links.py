"""What --links host changes in a configuration."""

from pathlib import Path

import pytest

from headrace.server.config.resolve import resolve
from tests.server.config.test_experts import configured, folder

__all__ = ["folder"]


@pytest.mark.parametrize(
    ("flags", "graphs"), [("--links host --tp 2", "off"), ("--links host", "auto"), ("--tp 2", "auto")]
)
def test_there_are_no_cuda_graphs_where_the_host_waits_for_sums(folder: Path, flags: str, graphs: str) -> None:
    assert resolve(configured(folder, flags.split())).config.engine.cuda_graphs == graphs
