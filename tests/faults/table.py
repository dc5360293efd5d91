"""The fault matrix: which kind of fault strikes where, and in which phase of requests.

Every kind of fault has a cell for every place: it strikes real servers there, or tests elsewhere prove it, or it does
not apply, and why.
"""

from collections.abc import Iterator

from tests.faults import links, processes
from tests.faults.cells import EACH, PLACES, Case, Cell, Fault, Group, NotApplicable, Struck, fault
from tests.faults.pair import PEER_TIMEOUT_S
from tests.faults.phases import Phase

LONGER_S = PEER_TIMEOUT_S + 2.0  # than any patience of a peer
ONE = (
    "decode front end", "decode scheduler", "decode stage", "prefill front end", "prefill scheduler",
    "prefill stage 0", "prefill stage 1",
)  # fmt: skip
NO_PROCESS = "a fault of processes"
NO_LINK = "a fault of connections"
QUICK: dict[str, tuple[Phase, ...]] = {"prefill stage 1": ("computing",), "prefill scheduler": ("transferring",)}


def _signals() -> Group:
    none = {place: NO_PROCESS for place in PLACES}
    kills: dict[str, Cell] = {place: Struck(processes.killed(place), EACH, quick=QUICK.get(place, ())) for place in ONE}
    kills["a whole server"] = Struck(processes.killed("prefill"))
    kills["both servers"] = Struck(processes.killed("prefill", "decode"))
    long: dict[str, Cell] = {place: Struck(processes.stopped(place), EACH, LONGER_S) for place in ONE}
    long["a whole server"] = Struck(processes.stopped("prefill"), hold_s=LONGER_S)
    long["both servers"] = Struck(processes.stopped("prefill", "decode"), hold_s=LONGER_S)
    short: dict[str, Cell] = {place: Struck(processes.stopped(place), hold_s=0.5) for place in ONE}
    short["a whole server"] = Struck(processes.stopped("prefill"), hold_s=0.5)
    short["both servers"] = Struck(processes.stopped("prefill", "decode"), hold_s=0.5)
    return Group(
        "Processes",
        (
            fault("killed", "SIGKILL", kills, none),
            fault("stopped for long", f"SIGSTOP, SIGCONT after {LONGER_S:g} s", long, none),
            fault("stopped for a moment", "SIGSTOP, SIGCONT after 0.5 s", short, none),
        ),
    )


GROUPS = (_signals(),)


def faults() -> Iterator[tuple[Group, Fault]]:
    for group in GROUPS:
        for each in group.faults:
            yield group, each


def cases() -> list[Case]:
    """All strikes, those on one bench together."""
    found = [
        Case(each.name, place, phase, cell)
        for _, each in faults()
        for place, cell in each.cells.items()
        if isinstance(cell, Struck)
        for phase in cell.phases
    ]
    order = [case.struck.bench for case in found]
    return sorted(found, key=lambda case: order.index(case.struck.bench))
