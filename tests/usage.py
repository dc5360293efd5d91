"""What a process holds of the machine, as Linux counts it."""

from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """One reading of a process."""

    anonymous_mib: float
    """Resident memory that no file is behind: what it has allocated."""
    descriptors: int
    threads: int


def usage(pid: int) -> Usage:
    """Read it from /proc. Raises FileNotFoundError or ProcessLookupError for a process that has ended."""
    process = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    anonymous_kib = int(status["RssAnon"].split()[0])
    return Usage(anonymous_kib / 1024, len(list((process / "fd").iterdir())), int(status["Threads"]))
