"""CPUs that tests run as, whatever this machine has: HEADRACE_CPUINFO names a file of tests/cpuinfo.

What the CPU says decides which dtype "auto" is, what 16-bit models are computed in, and which code multiplies. It does
not make the CPU another one: what it lacks is done in software.
"""

from pathlib import Path

from headrace.core.config import EngineConfig
from headrace.engine.device import has_matrix_units

KINDS = {"avx2": "float32", "bf16": "bfloat16"}  # and which dtype "auto" is there


def cpuinfo(kind: str) -> str:
    """The file of one of KINDS."""
    return str(Path(__file__).with_name("cpuinfo") / kind)


def other_kind() -> str:
    """The one that this machine is not."""
    return "avx2" if has_matrix_units("bfloat16", "cpu", EngineConfig().cpuinfo) else "bf16"
