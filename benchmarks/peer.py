"""Protocol of another engine's child process (benchmarks.peers): a line with a JSON list of prompts in, seconds out.

Standard library only, since it runs in the engine's own environment. What the engine prints goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

READY = "ready"  # first line, when the engine is loaded


def take_stdout() -> TextIO:
    """Standard output, for answers; everything else printed from now on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(compute: Callable[[list[list[int]]], None], answers: TextIO) -> None:
    """Print READY, then compute lists of prompts until standard input ends, and print the seconds of each."""
    with answers:
        print(json.dumps(READY), file=answers)
        for line in sys.stdin:
            prompts = json.loads(line)
            started = time.perf_counter()
            compute(prompts)
            print(json.dumps(time.perf_counter() - started), file=answers)
