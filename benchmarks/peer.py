"""What a benchmarked engine's child process speaks: a JSON list of prompts comes in a line, the seconds go out.

Standard library alone, since it runs in the engine's own environment. The engine's own printing goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

READY = "ready"


def take_stdout() -> TextIO:
    """What answers go to. Whatever else is printed from now on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(compute: Callable[[list[list[int]]], None], answers: TextIO) -> None:
    """Say that all is loaded, then compute what is asked until standard input ends."""
    with answers:
        print(json.dumps(READY), file=answers)
        for line in sys.stdin:
            prompts = json.loads(line)
            started = time.perf_counter()
            compute(prompts)
            print(json.dumps(time.perf_counter() - started), file=answers)
