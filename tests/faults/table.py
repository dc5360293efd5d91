"""The fault matrix: which kind of fault strikes where, and in which phase of requests.

Every kind of fault has a cell for every place: it strikes real servers there, or tests elsewhere prove it, or it does
not apply, and why.
"""

from collections.abc import Iterator

from tests.faults import clocks, devices, disks, groups, limits, links, network, processes
from tests.faults.cells import AT_ONCE, EACH, PLACES, Case, Cell, Fault, Group, Proven, Struck, fault
from tests.faults.pair import PEER_TIMEOUT_S
from tests.faults.phases import Phase

LONGER_S = PEER_TIMEOUT_S + 2.0  # than any patience of a peer
ONE = (
    "decode front end", "decode scheduler", "decode stage", "prefill front end", "prefill scheduler",
    "prefill stage 0", "prefill stage 1",
)  # fmt: skip
LINKS = ("HTTP", "control", "data")
NO_PROCESS = "a fault of processes"
NONFINITE = "tests/e2e/test_nonfinite.py::"
NO_LINK = "a fault of connections"
QUICK_LINKS = ((links.half_open, "data"),)
BROKEN = (links.reset, links.refused, links.half_open, links.silent, links.silent_up, links.silent_down)
"""These are felt without a request, too."""
QUICK: dict[str, tuple[Phase, ...]] = {"prefill stage 1": ("computing",)}


def _signals() -> Group:
    none = dict.fromkeys(PLACES, NO_PROCESS)
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
            _shared_memory(),
            _siblings(),
            _in_the_middle(),
            _storms(),
        ),
    )


def _shared_memory() -> Fault:
    shm = (
        "tests/e2e/test_shm.py::test_pages_that_a_stopped_prefill_server_may_write_stay_in_quarantine_until_it_is_gone"
    )
    places = ("decode front end", "decode stage", "prefill scheduler", "prefill stage 0", "prefill stage 1")
    cells: dict[str, Cell] = {place: Struck(processes.killed(place), ("computing",), bench="shm") for place in places}
    cells["both servers"] = Struck(processes.killed("prefill", "decode"), ("computing",), bench="shm")
    cells["a whole server"] = Proven((shm,))
    why = {place: "touches no shared memory" if place in ONE else NO_PROCESS for place in PLACES}
    return fault("killed beside shared memory", "SIGKILL while KV is written into the other server's pool", cells, why)


def _siblings() -> Fault:
    """The server that a prefill server fetches a prefix from."""
    tests = (
        "test_prefixes.py::test_a_sibling_that_is_dead_costs_no_request",
        "test_prefixes.py::test_a_sibling_that_falls_silent_or_dies_in_the_middle_costs_no_request",
        "test_prefixes.py::test_a_sibling_that_falls_silent_or_dies_in_a_prefetch",
        "test_prefixes_in_tiers.py::test_a_holder_that_dies_or_hangs_while_it_loads_costs_no_request",
    )
    cells = {"a whole server": Proven(tuple(f"tests/e2e/{test}" for test in tests))}
    others = {place: "the whole server dies with it" if place in ONE else NO_PROCESS for place in PLACES}
    return fault("a sibling killed", "SIGKILL or SIGSTOP of a sibling before or while a prefix comes", cells, others)


def _in_the_middle() -> Fault:
    """A prefill server that has sent a part of a prompt, which another one goes on with."""
    tests = (
        "test_servers_killed_at_every_chunk_of_a_prompt",
        "test_a_prompt_whose_server_drains_goes_on_at_another_one",
        "test_a_prompt_whose_server_stops_goes_on_at_another_one",
        "test_two_servers_that_die_one_after_the_other_and_the_prompt_is_finished_at_home",
    )
    cells = {"a whole server": Proven(tuple(f"tests/e2e/test_resume.py::{test}" for test in tests))}
    others = {place: "the whole server dies with it" if place in ONE else NO_PROCESS for place in PLACES}
    how = "SIGKILL at each chunk of a prompt, SIGTERM or SIGSTOP; another prefill server goes on with it"
    return fault("a prompt's server lost in the middle", how, cells, others)


def _frozen() -> Fault:
    cells: dict[str, Cell] = {place: Struck(groups.frozen(place), AT_ONCE, LONGER_S, needs="freezer") for place in ONE}
    cells["a whole server"] = Struck(groups.frozen("prefill"), hold_s=LONGER_S, needs="freezer")
    cells["both servers"] = Struck(groups.frozen("prefill", "decode"), hold_s=LONGER_S, needs="freezer")
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
            place: Struck(
                links.changed(place.lower(), change),
                AT_ONCE if idle else AT_ONCE[:1],
                hold_s,
                quick=AT_ONCE[:1] if (change, place) in QUICK_LINKS else (),
            )
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
        "prefill front end": Struck(groups.no_forks("prefill front end", "prefill stage 1"), hold_s=3.0, needs="pids"),
        "decode front end": Struck(groups.no_forks("decode front end", "decode stage"), hold_s=3.0, needs="pids"),
    }
    start_nothing = {place: "starts no process" for place in ONE if place not in forks}
    memory: dict[str, Cell] = {place: Struck(groups.out_of_memory(place), AT_ONCE[:1], needs="memory") for place in ONE}
    crowds: dict[str, Cell] = {
        place: Struck(limits.crowded(1000, place.lower()), ("all at once",), 2.0, needs="descriptors")
        for place in ("HTTP", "control", "data")
    }
    others = {place: NO_LINK if place in ONE else NO_PROCESS for place in PLACES}
    whole = {"a whole server": "each of its processes by itself", "both servers": "each process by itself"}
    return Group(
        "Scarcity",
        (
            fault("no descriptors", "a limit at what is open; connections are reset, a stage is killed", descriptors,
                  others | whole | {"files": NO_PROCESS}),
            fault("no processes", "a pids control group at its count while a stage is killed", forks,
                  dict.fromkeys(PLACES, NO_PROCESS) | start_nothing | whole),
            fault("out of memory", "a memory control group without room: the kernel kills at the next allocation",
                  memory, dict.fromkeys(PLACES, NO_PROCESS) | whole),
            fault("1,000 connections", "idle ones, made anew when they are closed", crowds, others | whole |
                  dict.fromkeys(ONE, "has no port") | {"files": NO_LINK}),
        ),
    )  # fmt: skip


def _packets() -> Group:
    def there(
        prefill: dict[str, float] | None, decode: dict[str, float] | None, hold_s: float, within_s: float = 0
    ) -> Cell:
        strike = network.weather(prefill, decode)
        phases = AT_ONCE if within_s else AT_ONCE[:1]
        return Struck(strike, phases, hold_s, "network", needs="namespaces", ends_within_s=within_s)

    bad = {
        "5 % lost": {"loss": 0.05},
        "reordered": {"delay_s": 0.005, "jitter_s": 0.02},
        "10 % doubled": {"double": 0.1},
        "5 % damaged": {"damage": 0.05},
        "far away": {"delay_s": 0.1},
        "125 kB/s": {"bytes_per_s": 125e3},
        "all at once": {"loss": 0.02, "delay_s": 0.02, "jitter_s": 0.02, "double": 0.02, "damage": 0.02},
    }
    gone, soon = {"loss": 1.0}, PEER_TIMEOUT_S + 2.0
    cells = [(f"packets: {name}", f"{fate}, each way", there(fate, fate, 3.0)) for name, fate in bad.items()]
    cells += [
        ("partition", "no packet arrives", there(gone, gone, LONGER_S + 1, soon)),
        ("one-way partition", "no packet of the prefill server arrives", there(gone, None, LONGER_S + 1, soon)),
        ("the other way", "no packet of the decode server arrives", there(None, gone, LONGER_S + 1, soon)),
        ("partition for a moment", "no packet arrives for 0.5 s", there(gone, gone, 0.5)),
    ]
    why = dict.fromkeys(PLACES, NO_LINK) | dict.fromkeys(LINKS, "strikes all connections at once: see both servers")
    return Group(
        "Packets, by a relay between two network namespaces",
        tuple(fault(name, how, {"both servers": cell}, why) for name, how, cell in cells),
    )


def _disks() -> Group:
    def at(side: str, folder: str, victim: str = "") -> Cell:
        return Struck(disks.full(side, folder, victim), ("all at once",), 2.0, "disks", needs="mounts")

    none = dict.fromkeys(ONE, "shows in its server's other cells")
    none |= dict.fromkeys((*LINKS, "a whole server", "both servers"), "a fault of disks")
    none["files"] = "tests of damaged files"
    restarted = "while it starts again"
    return Group(
        "Full disks",
        (
            fault("no room for logs", "stdout and stderr in a full file system", {
                "decode front end": at("decode", "log"), "prefill front end": at("prefill", "log"),
                "prefill scheduler": at("prefill", "log", "prefill scheduler"),
                "prefill stage 0": at("prefill", "log", "prefill stage 0"),
            }, none),
            fault("no room for temporary files", "TMPDIR full, a stage killed", {
                "decode stage": at("decode", "tmp", "decode stage"),
                "prefill stage 1": at("prefill", "tmp", "prefill stage 1"),
            }, none | dict.fromkeys((), restarted)),
            fault("no room in the cache folder", "--cache-dir full", {
                "decode front end": at("decode", "cache"), "prefill front end": at("prefill", "cache"),
                "files": Proven(("tests/faults/test_disks.py::test_a_start_with_a_full_cache_folder",)),
            }, none),
            fault("no room in the disk tier", "--disk-path full", {
                "prefill stage 0": at("prefill", "kv"), "prefill stage 1": at("prefill", "kv", "prefill stage 1"),
            }, none),
            fault("/dev/shm full", "a tmpfs of 64 MB", {
                "decode stage": at("decode", "shm"), "prefill stage 0": at("prefill", "shm"),
                "files": Proven(("tests/faults/test_disks.py::test_a_start_with_full_shared_memory",)),
            }, none),
        ),
    )  # fmt: skip


def _clocks() -> Group:
    def jump(servers: tuple[str, ...], seconds: int) -> Cell:
        return Struck(clocks.jumped(servers, seconds), AT_ONCE, LONGER_S, "clock", needs="compiler")

    why = {place: "all processes of a machine have one clock" if place in ONE else NO_PROCESS for place in PLACES}
    rows = []
    for name, seconds in (("an hour forward", 3600), ("an hour back", -3600)):
        cells = {
            "a whole server": jump(("prefill",), seconds), "both servers": jump(("prefill", "decode"), seconds)
        }  # fmt: skip
        rows.append(fault(name, f"CLOCK_REALTIME {seconds:+d} s, and back", cells, why))
    return Group("Clocks", tuple(rows))


def _devices() -> Group:
    def at(server: str, kind: devices.Kind, last: bool, hold_s: float) -> Cell:
        return Struck(devices.broken(server, kind, last), AT_ONCE, hold_s)

    stages = {
        "decode stage": ("decode", False), "prefill stage 0": ("prefill", False), "prefill stage 1": ("prefill", True)
    }  # fmt: skip
    why = {place: "has no device" if place in ONE else NO_PROCESS for place in PLACES}
    memory = {place: at(server, "memory", last, 0.5) for place, (server, last) in stages.items()}
    hangs = {place: at(server, "hang", last, 0.5) for place, (server, last) in stages.items()}
    values: dict[str, Cell] = {
        "decode stage": Proven((f"{NONFINITE}test_nan_in_fetched_kv",)),
        "data": Proven((f"{NONFINITE}test_nan_in_fetched_kv",)),
        "prefill stage 1": Proven((f"{NONFINITE}test_through_a_pair",)),
        "prefill stage 0": Proven((f"{NONFINITE}test_bad_prompts_among_good_ones",)),
    }
    return Group(
        "Devices",
        (
            fault("device out of memory", "a forward pass raises torch.OutOfMemoryError", memory, why),
            fault("device hangs", "a forward pass never returns: --stage-timeout", hangs, why),
            fault("NaN", "in weights, and in KV that comes by wire", values, why),
        ),
    )


def _damage() -> Group:
    def shown(*names: str) -> Cell:
        return Proven(tuple(f"tests/faults/test_damage.py::{name}" for name in names))

    why = dict.fromkeys(PLACES, "a fault of files")
    return Group(
        "Damaged files",
        (
            fault("damaged weights", "bits flipped, ends cut off, in safetensors and GGUF", {
                "files": shown("test_damaged_headers_are_refused", "test_damaged_gguf_headers_are_refused",
                               "test_a_changed_weight_is_another_model"),
                "prefill stage 0": Proven((f"{NONFINITE}test_bad_prompts_among_good_ones",)),
            }, why),
            fault("damaged disk tier", "bits flipped in segments, between two lives and under load", {
                "files": shown("test_damaged_pages_of_the_disk_tier_are_not_used"),
            }, why),
            fault("damaged cache folder", "files of --cache-dir with other bytes", {
                "files": shown("test_a_damaged_tokenizer_in_the_cache_folder"),
            }, why),
        ),
    )  # fmt: skip


def _crowds() -> Group:
    unread = "tests/e2e/test_unread.py::"
    reading = {
        "control": Proven((f"{unread}test_flooding_a_port_without_reading_answers_costs_a_few_megabytes",)),
        "data": Proven((f"{unread}test_a_peer_that_pings_and_never_reads_loses_its_session_and_others_lose_nothing",
                        f"{unread}test_flooding_a_port_without_reading_answers_costs_a_few_megabytes")),
        "HTTP": Struck(limits.unread_streams(40), ("all at once",), 2.0),
    }  # fmt: skip
    herd: dict[str, Cell] = {"control": Struck(limits.herd(50), ("all at once",), 3.0)}
    return Group(
        "Crowds",
        (
            fault("readers that never read", "floods and streams whose answers are not read", reading,
                  {place: "has no port of its own" if place in ONE else NO_LINK for place in PLACES}),
            fault("a reconnecting herd", "50 peers that say hello again as soon as they are cut off", herd,
                  dict.fromkeys(PLACES, "decode servers reconnect to the control endpoint")),
        ),
    )  # fmt: skip


def _returns() -> Group:
    tests = "tests/e2e/test_returns.py::"
    dies: dict[str, Cell] = {
        "a whole server": Proven((
            f"{tests}test_the_decode_server_dies_while_it_returns_kv",
            f"{tests}test_the_prefill_server_dies_while_it_takes_kv",
        )),
        "prefill stage 0": Proven((f"{tests}test_the_stage_that_takes_kv_stops_for_a_moment",)),
    }  # fmt: skip
    why = dict.fromkeys(PLACES, "by random schedules: tests/testing/test_prefixes.py")
    lies = Proven((f"{NONFINITE}test_nan_in_kv_that_a_decode_server_returns",))
    checked = "refused, as KV of prompts is: the receiver checks both alike"
    return Group(
        "KV that comes back",
        (
            fault("dies or stops while KV comes back", "SIGKILL, and SIGSTOP of the stage that takes it", dies, why),
            fault("a decode server that lies", "NaN in KV that it returns, with a right checksum", {"data": lies},
                  checked),
        ),
    )  # fmt: skip


GROUPS = (
    _signals(), _links(), _packets(), _scarcity(), _disks(), _clocks(), _devices(), _damage(), _crowds(), _returns()
)  # fmt: skip


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
