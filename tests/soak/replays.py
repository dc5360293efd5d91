"""Recorded schedules: the calls of their schedulers are made again, and every one has the effects that it had.

    schedule ──► tapes: snapshot, at a random call ── calls
                   again: └───────────────────────────────►

Of one schedule in WHOLE there is a snapshot before its first call as well, from which all calls are made again.
Tapes are in memory, encoded as in a file; that of a scheduler that decides otherwise is written to one.
"""

from collections import Counter

from headrace.scheduler.recording.file import SUFFIX
from headrace.testing.scenario import Scenario
from tests.scheduler.recordings import FOLDER, Tape, replayed, taped_at_random
from tests.soak.cases import Case, Result, run_case

WHOLE = 8


def run_recorded(case: Case) -> Result:
    """run_case(), and the same again for each of its schedulers. A call with other effects is a problem."""
    if not isinstance(case, Scenario):
        return run_case(case)
    with taped_at_random(case, whole=case.seed % WHOLE == 0) as tapes:
        result = run_case(case)
    problems, replays, files = list(result.problems), Counter({"schedulers": len(tapes)}), []
    for number, tape in enumerate(tapes):
        replays["calls recorded"] += len(tape.calls)
        count, problem = _again(tape)
        replays["calls made again"] += count
        if problem:
            replays["schedulers that decide otherwise"] += 1
            problems.append(f"replay of scheduler {number}: {problem}")
            path = FOLDER / f"replay-{case.seed}-{number}{SUFFIX}"
            path.parent.mkdir(parents=True, exist_ok=True)
            tape.write(path)
            files.append(str(path))
    return result._replace(problems=problems, replays=replays, recordings=tuple(files))


def _again(tape: Tape) -> tuple[int, str]:
    try:
        return replayed(tape.recording(), beyond=True)
    except Exception as error:
        return 0, f"raised {type(error).__name__}: {error}"
