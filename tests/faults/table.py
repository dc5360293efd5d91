"""The fault matrix: which kind of fault strikes where, and in which phase of requests.

Every kind of fault has a cell for every place: it strikes real servers there, or tests elsewhere prove it, or it does
not apply, and why.
"""

from collections.abc import Iterator

from tests.faults import groups, limits, links, processes
from tests.faults.cells import AT_ONCE, EACH, PLACES, Case, Cell, Fault, Group, Proven, Struck, fault
from tests.faults.pair import PEER_TIMEOUT_S
from tests.faults.phases import Phase

LONGER_S = PEER_TIMEOUT_S + 2.0  # than any patience of a peer
ONE = (
    "decode front end", "decode scheduler", "decode stage", "prefill front end", "prefill scheduler",
    "prefill stage 0", "prefill stage 1",
)  # fmt: skip
NO_PROCESS = "a fault of processes"
NO_LINK = "a fault of connections"
BROKEN = (links.reset, links.refused, links.half_open, links.silent, links.silent_up, links.silent_down)
"""What a connection without a request feels, too."""
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
            _frozen(),
            _storms(),
        ),
    )


def _frozen() -> Fault:
    cells: dict[str, Cell] = {place: Struck(groups.frozen(place), AT_ONCE, LONGER_S) for place in ONE}
    cells["a whole server"] = Struck(groups.frozen("prefill"), hold_s=LONGER_S)
    cells["both servers"] = Struck(groups.frozen("prefill", "decode"), hold_s=LONGER_S)
    how = f"the freezer of control groups, for {LONGER_S:g} s"
    return fault("frozen", how, cells, NO_PROCESS)


def _storms() -> Fault:
    cells: dict[str, Cell] = {
        place: Struck(processes.killed_again(place, 4, pause_s))
        for place, pause_s in (("decode stage", 1.0), ("prefill stage 1", 1.0), ("prefill scheduler", 3.0))
    }
    others = {place: "starts again in the same way" for place in ONE if place not in cells}
    others |= {place: NO_PROCESS for place in PLACES if place not in ONE}
    others |= {"a whole server": "is its front end's start", "both servers": "is their front ends' start"}
    return fault("a storm of restarts", "SIGKILL 4 times, 1 s apart (3 s for the scheduler)", cells, others)


def _links() -> Group:
    def on_each(change: links.Change, hold_s: float, idle: bool) -> dict[str, Cell]:
        return {
            place: Struck(links.changed(place.lower(), change), AT_ONCE if idle else AT_ONCE[:1], hold_s)
            for place in ("HTTP", "control", "data")
        }

    rows = (
        ("latency", "100 to 200 ms each way", links.both_ways(links.late), 3.0),
        ("narrow", "20 kB/s each way", links.both_ways(links.narrow), 3.0),
        ("in pieces", "1 to 700 bytes at once, which cuts frames anywhere", links.both_ways(links.in_pieces), 2.0),
        ("byte by byte", "each byte is written alone", links.both_ways(links.by_bytes), 2.0),
        ("reset", "RST at both ends of every connection", links.reset, 0.0),
        ("refused", "RST, and to every new connection", links.refused, LONGER_S),
        ("half-open", "RST at the prefill server's end only", links.half_open, LONGER_S),
        ("silent towards the prefill server", "its bytes stay away, connections stay", links.silent_up, LONGER_S),
        ("silent towards the decode server", "its bytes stay away, connections stay", links.silent_down, LONGER_S),
        ("silent both ways", "no byte comes through, connections stay", links.silent, LONGER_S),
        ("silent for a moment", "no byte comes through for 0.5 s", links.silent, 0.5),
    )
    return Group(
        "Connections, by relays between the servers",
        tuple(
            fault(name, how, on_each(change, hold_s, change in BROKEN), NO_LINK) for name, how, change, hold_s in rows
        ),
    )


def _scarcity() -> Group:
    descriptors: dict[str, Cell] = {place: Struck(limits.no_descriptors(place), AT_ONCE, 2.0) for place in ONE}
    descriptors["prefill front end"] = Struck(limits.no_descriptors("prefill front end", "prefill stage 0"), hold_s=2.0)
    descriptors["decode front end"] = Struck(limits.no_descriptors("decode front end", "decode stage"), hold_s=2.0)
    idle_connections = "tests/e2e/test_idle_connections.py::test_a_pair_behind_a_crowd"
    descriptors |= {link: Proven((idle_connections,)) for link in ("HTTP", "control", "data")}
    forks: dict[str, Cell] = {
        "prefill front end": Struck(groups.no_forks("prefill front end", "prefill stage 1"), hold_s=3.0),
        "decode front end": Struck(groups.no_forks("decode front end", "decode stage"), hold_s=3.0),
    }
    start_nothing = {place: "starts no process" for place in ONE if place not in forks}
    memory: dict[str, Cell] = {place: Struck(groups.out_of_memory(place), hold_s=2.0) for place in ONE}
    crowds: dict[str, Cell] = {
        place: Struck(limits.crowded(1000, place.lower()), ("all at once",), 2.0) for place in ("HTTP", "control", "data")
    }
    others = {place: NO_LINK if place in ONE else NO_PROCESS for place in PLACES}
    whole = {"a whole server": "each of its processes by itself", "both servers": "each process by itself"}
    return Group(
        "Scarcity",
        (
            fault("no descriptors", "a limit at what is open; connections are reset, a stage is killed", descriptors,
                  others | whole | {"files": NO_PROCESS}),
            fault("no processes", "a pids control group at its count while a stage is killed", forks,
                  {place: NO_PROCESS for place in PLACES} | start_nothing | whole),
            fault("out of memory", "a memory control group without room: the kernel kills at the next allocation",
                  memory, {place: NO_PROCESS for place in PLACES} | whole),
            fault("1,000 connections", "idle ones, made anew when they are closed", crowds, others | whole |
                  {place: "has no port" for place in ONE} | {"files": NO_LINK}),
        ),
    )  # fmt: skip


GROUPS = (_signals(), _links(), _scarcity())


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
