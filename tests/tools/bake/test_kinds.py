"""KV files of two kinds of CPU: each kind gives the same bits every time, and another kind gives others."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.core.types.kv.kv_files import KvFileHeader
from headrace.engine.kv.tiers.kv_source import FileSource, read_header
from tests.cpus import KINDS, cpuinfo

TOKENS = [100 + index * 31 % 20_000 for index in range(96)]


class Baked(NamedTuple):
    header: KvFileHeader
    values: NDArray[np.float32]


def bake(folder: Path, name: str, dtype: str, kind: str, **environ: str) -> Baked:
    out, ids = folder / f"{name}.kv", folder / "ids.json"
    ids.write_text(json.dumps(TOKENS))
    command = [sys.executable, "-m", "headrace.cli.commands", "bake", "--token-ids", str(ids), "-o", str(out)]
    subprocess.run(
        [*command, "--dtype", dtype, "--max-model-len", "2048", "--kv-pages", "128"],
        check=True,
        timeout=240,
        env={**os.environ, "HEADRACE_CPUINFO": cpuinfo(kind), **environ},
    )
    source = FileSource(str(out))
    start, header = read_header(source, time.monotonic() + 10)
    source.close()
    raw = np.frombuffer(out.read_bytes()[start.pages_at :], np.uint8)
    if dtype == "float32":
        return Baked(header, raw.view(np.float32))
    return Baked(header, (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_of_one_kind_are_equal_and_of_two_are_not(dtype: str, tmp_path: Path) -> None:
    """The table of docs/kv-files.md."""
    first, other = KINDS
    one = bake(tmp_path, "one", dtype, first)
    again = bake(tmp_path, "again", dtype, first, OMP_NUM_THREADS="2", ATEN_CPU_CAPABILITY="default")
    different = bake(tmp_path, "different", dtype, other)
    assert one.header.checksums == again.header.checksums, "threads and torch's own operators change no bit"
    assert one.header.computation.device != different.header.computation.device
    assert one.header.fingerprint == different.header.fingerprint
    gap = np.abs(one.values - different.values)
    share = np.mean(gap > 0)
    print(f"{dtype}: {share:.1%} differ, by {gap.max():.2g} at most, of {np.abs(one.values).max():.3g}")
    assert share > 0.01, "so the server refuses it"
    assert gap.max() < (1e-3 if dtype == "float32" else 2.0)
