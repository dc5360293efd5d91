"""The flags of `headrace simulate`, and the replays that they ask for.

Flags of the scheduler and of the KV pool are those of `headrace serve`, with their defaults. Where a list is given,
separated by commas, every combination is replayed.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.config.flag import KV_CACHE, SCHEDULING, STAGES
from headrace.core.config.scheduler import CPU_CHUNK_TOKENS
from headrace.core.types.errors import ConfigError
from headrace.scheduler.costs.chunking import Cost
from headrace.server.config.flags import add_flag
from headrace.server.config.load import load
from headrace.server.config.settings import BY_KEY, SETTINGS, Setting
from headrace.server.config.values import parse_value
from headrace.tools.simulate.objectives import OBJECTIVES
from headrace.tools.simulate.replay.decode_server import REMOTES, Remote
from headrace.tools.simulate.replay.hints import HINTS, Hints
from headrace.tools.simulate.replay.routing import ROUTERS

T = TypeVar("T")
DESCRIPTION = "answer capacity questions: replay a trace of requests through the scheduler in virtual time"
PAGE_SIZE = 512  # of Mooncake's blocks; large pages make replays quick
MOST_REPLICAS = 1024
DECODE_CHUNK_TOKENS = 1024
HANDOFF_S = 0.01
TPOT_OBJECTIVE_S = 0.1
OF_DECODE_SERVERS = (
    "decode-servers", "decode-chunk-tokens", "decode-cost", "read-rate", "handoff-s", "tpot-objective",
)  # fmt: skip


class Preset(msgspec.Struct, frozen=True):
    """A model on its machine, as published or measured."""

    cost: Cost
    kv_tokens: int
    """Tokens that fit its KV pool."""

    read_rate: float
    """Tokens a second whose KV requests that decode read."""


# a, b, c: Llama 3 70B in bfloat16 on 8 H100 at about half of peak; the pool is what 640 GB leave beside the weights;
# KV of 320 KiB a token is read at 70 % of the memory's 26.8 TB/s.
PRESETS: Mapping[str, Preset] = {"llama-3-70b-8xh100": Preset((3.3e-10, 35.7e-6, 8e-3), 2700 * 512, 5.7e7)}
DEFAULT_PRESET = "llama-3-70b-8xh100"

CONVERSATIONS = ("hints", "returns", "siblings", "open")
PARTS: Mapping[str, tuple[str, ...]] = {"none": ()} | {part: (part,) for part in CONVERSATIONS} | {"all": CONVERSATIONS}
"""What --parts names: the flags that are on, of those that make conversations cheaper."""

HOST_PAGES = "host-pages"
_SWITCH = dict.fromkeys(("on", "off"))
_OPEN = _SWITCH | {"cancel": None}
_EXCLUDED = ("stage-timeout", "start-timeout", "dp", "tp")
_KEYS = ("page-size", "kv-pages", HOST_PAGES)
REPLAYED = tuple(
    setting
    for setting in SETTINGS
    if setting.key in _KEYS
    or (
        setting.slice == "scheduler"
        and setting.flag.group in (SCHEDULING, KV_CACHE, STAGES)
        and setting.key not in _EXCLUDED
    )
)
"""Settings of `headrace serve` that a replay takes."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One replay of the sweep."""

    swept: dict[str, Any]
    """Values of the flags that were given as lists, by key."""

    scheduler: SchedulerConfig
    """Without the costs' pool: kv_pages is 0 where it was not given."""

    host_pages: int
    """Of each server's host tier."""

    replicas: int
    siblings: bool
    """They fetch prefixes from each other."""

    hints: Hints | None
    """What clients say of their conversations; None: conversations are not looked for."""

    returns: bool | None
    """Decode servers offer the KV of turns back; None: conversations are not looked for."""

    open: bool | None
    """Next turns are open prompts until they arrive; None: conversations are not looked for."""

    cancels: bool
    """Stages cancel passes of open prompts when others come."""

    router: str
    hedge: float
    """Times its forecast that a first token may take before a second server gets the prompt; 0: any."""

    remote: Remote | None
    """Of the decode servers; None: there are none."""

    load: float | None
    """Engine seconds offered per second; None: as in the trace."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the positional TRACE and all flags."""
    parser.add_argument("trace", metavar="TRACE", help="requests: JSON lines as of Mooncake, or CSV (FILE.csv)")
    ours = parser.add_argument_group("replay")
    ours.add_argument("--limit", metavar="N", help="replay the first N requests only")
    ours.add_argument("--load", metavar="X,X,...", help=_LOAD_HELP)
    ours.add_argument(
        "--replicas", metavar="N,N,...", default="1", help="servers; also a range such as 1..4 (default: 1)"
    )
    ours.add_argument("--siblings", metavar="{on,off},...", help=_SIBLINGS_HELP)
    ours.add_argument("--hints", metavar="{" + ",".join(HINTS) + "},...", help=_HINTS_HELP)
    ours.add_argument("--open", metavar="{off,on,cancel},...", help=_OPEN_HELP)
    ours.add_argument("--parts", metavar="{" + ",".join(PARTS) + "},...", help=_PARTS_HELP)
    ours.add_argument("--slow-server", metavar="FACTOR", help=_SLOW_HELP)
    ours.add_argument("--hedge", metavar="FACTOR,...", help=_HEDGE_HELP)
    ours.add_argument("--router", metavar="NAME,...", default="score", help=ROUTER_HELP)
    ours.add_argument(
        "--fetch-rate",
        metavar="TOKENS",
        help="tokens a second whose KV decode peers fetch from each server (default: all at once)",
    )
    ours.add_argument("--remote", metavar="{" + ",".join(REMOTES) + "},...", help=_REMOTE_HELP)
    ours.add_argument("--decode-servers", metavar="N", help="decode servers with --remote (default: 1)")
    ours.add_argument("--decode-chunk-tokens", metavar="N", help=_DECODE_CHUNK_HELP)
    ours.add_argument("--decode-cost", metavar="A,B,C", help="--cost of decode servers (default: that of the others)")
    ours.add_argument("--read-rate", metavar="TOKENS", help=_READ_RATE_HELP)
    ours.add_argument("--handoff-s", metavar="SECONDS", help=_HANDOFF_HELP)
    ours.add_argument("--returns", metavar="{on,off},...", help=_RETURNS_HELP)
    ours.add_argument("--tpot-objective", metavar="SECONDS", help=_TPOT_HELP)
    ours.add_argument("--host-rate", metavar="TOKENS", help=_HOST_RATE_HELP)
    ours.add_argument("--objective", metavar="{" + ",".join(OBJECTIVES) + "}", default="prop", help=_OBJECTIVE_HELP)
    ours.add_argument(
        "--send-objective", action="store_true", help="every request asks for its objective, as by slo_ttft_ms"
    )
    ours.add_argument("--retries", metavar="N", help=RETRIES_HELP)
    ours.add_argument("--json", metavar="FILE", help="also write all figures to this file")
    ours.add_argument("--plot", metavar="FILE.png", help="also draw them; needs pip install 'headrace[plot]'")
    engine = parser.add_argument_group("engine (one of)").add_mutually_exclusive_group()
    engine.add_argument(
        "--preset", metavar="NAME", help=f"{', '.join(PRESETS)} (default: {DEFAULT_PRESET}), with its KV pool"
    )
    engine.add_argument("--cost", metavar="A,B,C", help=_COST_HELP)
    engine.add_argument(
        "--calibrate", metavar="URL", help="measure A,B,C on a running server, which should be idle otherwise (20 s)"
    )
    server = parser.add_argument_group(
        "server",
        "As in headrace serve. Values separated by commas are all replayed, in every combination.",
    )
    server.add_argument("--config", metavar="FILE", help="TOML file of a server, whose settings are the defaults")
    for setting in REPLAYED:
        add_flag(server, _shown(setting))


def _shown(setting: Setting) -> Setting:
    """The setting as this command's help shows it: pages have another default, and pools another source."""
    if setting.key == "page-size":
        return msgspec.structs.replace(setting, default=PAGE_SIZE)
    if setting.key == "kv-pages":
        flag = msgspec.structs.replace(setting.flag, help="pages in the KV pool; 0: as many as the engine's above has")
        return msgspec.structs.replace(setting, flag=flag)
    return setting


_LOAD_HELP = (
    "scale time so that so many engine seconds of work come a second: 0.8 keeps one server 80%% busy, 1.6 two "
    "(default: as in the trace)"
)
_REMOTE_HELP = (
    "replay decode servers, too, which have all, none, or those prompts computed by a prefill server that are "
    "predicted to add less waiting there; they generate what the trace says (default: no decode servers)"
)
_DECODE_CHUNK_HELP = "--chunk-tokens of decode servers: prompts share these passes with requests that decode"
_DECODE_CHUNK_HELP += f" (default: {DECODE_CHUNK_TOKENS})"
_READ_RATE_HELP = (
    "tokens a second whose KV requests that decode read, all of a decode server's together (default: of the preset, "
    "else all at once)"
)
_HANDOFF_HELP = f"seconds that a handoff takes beside queue, computing and transfer (default: {HANDOFF_S:g})"
_TPOT_HELP = f"with --remote: seconds per token after the first that count as good (default: {TPOT_OBJECTIVE_S:g})"
_HOST_RATE_HELP = (
    "tokens a second whose KV is copied to the host tier, and as many from it, see --host-pages (default: all at once)"
)
_SIBLINGS_HELP = (
    "whether servers fetch prefixes from each other where that is predicted to be faster than computing them, at "
    "--fetch-rate, as with --sibling of headrace serve (default: off)"
)
_HINTS_HELP = (
    "KV hints of the clients: none; oracle: what comes again is retained until then; real: every turn is retained for "
    "twice the pauses so far; lying: one of two tenants retains everything for ever; predicted: sessions "
    "are named, and the server predicts when they go on. Adds tables by tenant and turn"
)
_OPEN_HELP = (
    "whether the prompts of next turns are open (POST /v1/prefill with open) and grow before they arrive, in eight "
    "parts over the end of the pause before them; on: they are computed in short passes; cancel: in long ones, which "
    "stages cancel when others come, as on CPUs. Adds a table by turn (with --remote: always)"
)
_PARTS_HELP = (
    "replay with none of --hints, --returns, --siblings and --open on, with one of them, or with all, in place of "
    "those flags; --hints says which hints (default: real). Adds a table by turn (returns, all: with --remote always)"
)
_RETURNS_HELP = (
    "whether decode servers offer the KV of each turn to the prefill server of its prompt, at --fetch-rate, as with "
    "--kv-return of headrace serve. Adds a table by turn (with --remote always)"
)
_SLOW_HELP = "passes of the first server take so many times as long, for 10 s of every 60 s (default: 1)"
_HEDGE_HELP = (
    "a second server gets a prompt whose first token takes so many times as long as forecast, as with --hedge of "
    "headrace serve; 0: never (default: 0)"
)
ROUTER_HELP = f"how a server is chosen where there are several: {', '.join(ROUTERS)} (default: score)"
_OBJECTIVE_HELP = (
    "time to first token that counts as good: prop: 1 s + 5 x computing the prompt alone; class: 2, 8, 30 s up to "
    "4,096, 32,768, more tokens; flat: 30 s (default: prop)"
)
RETRIES_HELP = (
    "how often a client comes again when it is refused with 429, after Retry-After seconds (default: 0); times count "
    "from its first attempt"
)
_COST_HELP = (
    "seconds of a forward pass: A per squared token, B per token, C besides; of all pipeline stages together, which "
    "take equal shares"
)


def points(given: Mapping[str, Any], environ: Mapping[str, str], longest: int) -> list[Point]:
    """The replays that were asked for, the last flag varying fastest. longest: tokens of the longest prompt, and of
    what is generated after it. Raises ConfigError for a bad value."""
    base = load({"config": given["config"]} if given.get("config") else {}, environ)
    page_size = base.engine.page_size if given.get("config") else PAGE_SIZE
    fixed = msgspec.structs.replace(
        base.scheduler,
        page_size=page_size,
        max_model_len=longest + 2,
        vocab_size=0,
    )
    return combinations(given, fixed, base.engine.host_pages)


def combinations(given: Mapping[str, Any], fixed: SchedulerConfig, host_pages: int) -> list[Point]:
    """Replays of every combination of the flags' values. fixed, host_pages: where no flag says otherwise. Raises
    ConfigError for a bad value."""
    settings = {setting.key: _listed(setting.key, given[setting.key]) for setting in REPLAYED if setting.key in given}
    lists: dict[str, tuple[Any, ...]] = {
        **settings,
        "router": _choices("--router", given["router"], ROUTERS),
        "replicas": _replicas(given["replicas"]),
        "siblings": _optional(given, "siblings", _SWITCH),
        "returns": _optional(given, "returns", _SWITCH),
        "open": _optional(given, "open", _OPEN),
        "parts": _optional(given, "parts", PARTS),
        "hints": _optional(given, "hints", dict.fromkeys(HINTS)),
        "remote": _optional(given, "remote", dict.fromkeys(REMOTES)),
        "hedge": (0.0,) if given["hedge"] is None else _hedges(given["hedge"]),
        "load": (None,) if given["load"] is None else _numbers("--load", given["load"]),
    }
    swept = [key for key, values in lists.items() if len(values) > 1]
    _check_parts(given, lists["parts"])
    if any(lists["hedge"]) and (given["remote"] is not None or lists["router"] != ("score",)):
        raise ConfigError("--hedge is replayed with --router score, and without decode servers: leave --remote out")
    found = []
    for values in product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        changed = {BY_KEY[key].field: chosen[key] for key in settings if key != HOST_PAGES}
        changed["chunk_tokens"] = changed.get("chunk_tokens") or fixed.chunk_tokens or CPU_CHUNK_TOKENS
        found.append(
            Point(
                swept={key: chosen[key] for key in swept if key != "load"},
                scheduler=msgspec.structs.replace(fixed, **changed),
                host_pages=chosen.get(HOST_PAGES, host_pages),
                replicas=chosen["replicas"],
                **_parts(chosen),
                router=chosen["router"],
                hedge=chosen["hedge"],
                remote=chosen["remote"],
                load=chosen["load"],
            )
        )
    return found


def _check_parts(given: Mapping[str, Any], parts: Sequence[str | None]) -> None:
    """Raises ConfigError for flags of conversations that do not go together, or not with the decode servers."""
    for option in ("siblings", "returns", "open") if given["parts"] is not None else ():
        if given[option] is not None:
            raise ConfigError(f"--parts says where --{option} is on; leave --{option} out")
    if given["returns"] is not None and given["remote"] != "always":
        raise ConfigError("--returns is for decode servers that compute no prompt; add --remote always")
    if given["open"] is not None and given["remote"] not in (None, "always"):
        raise ConfigError("--open is for decode servers that compute no prompt; leave --remote out or at always")
    if any("returns" in PARTS[name] for name in parts if name is not None) and given["remote"] != "always":
        raise ConfigError("--parts returns and all are for decode servers that compute no prompt; add --remote always")
    if given["parts"] is not None and given["remote"] not in (None, "always"):
        raise ConfigError("--parts is for decode servers that compute no prompt; leave --remote out or at always")


def _parts(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Point that are of conversations."""
    if chosen["parts"] is None:
        returns, opened = chosen["returns"], chosen["open"]
        return {
            "siblings": chosen["siblings"] == "on",
            "hints": chosen["hints"],
            "returns": None if returns is None else returns == "on",
            "open": None if opened is None else opened != "off",
            "cancels": opened == "cancel",
        }
    on = PARTS[chosen["parts"]]
    return {
        "siblings": "siblings" in on,
        "hints": (chosen["hints"] or "real") if "hints" in on else "none",
        "returns": None if chosen["remote"] is None else "returns" in on,
        "open": "open" in on,
        "cancels": False,
    }


def parse_cost(option: str, text: str) -> Cost:
    """The value of --cost or --decode-cost. Raises ConfigError."""
    parts = text.split(",")
    values = [_number(part) for part in parts]
    if len(values) != 3 or not all(value >= 0 for value in values) or not any(values):
        raise ConfigError(f"{option}: expected three numbers of seconds such as 3.3e-10,35.7e-6,8e-3, got {text!r}")
    return values[0], values[1], values[2]


def parse_choice(option: str, text: str, known: Mapping[str, object]) -> str:
    """One of the known names. Raises ConfigError."""
    if text not in known:
        raise ConfigError(f"{option}: expected one of {', '.join(known)}, got {text!r}")
    return text


def parse_whole(option: str, text: str | None) -> int | None:
    """A whole number, at least 1; None where the flag was not given. Raises ConfigError."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"{option}: expected a whole number, at least 1, got {text!r}")
    return int(text)


def parse_rate(option: str, text: str | None) -> float | None:
    """A number above 0; None where the flag was not given. Raises ConfigError."""
    return None if text is None else _numbers(option, text, single=True)[0]


def _listed(key: str, given: object) -> tuple[Any, ...]:
    """The values of one setting. Switches, and settings that are lists themselves, have one."""
    setting = BY_KEY[key]
    parts: list[object] = [given]
    if isinstance(given, str) and setting.kind not in ("list", "integers", "choices"):
        parts = [part.strip() for part in given.split(",")]
    return _distinct(setting.option, [parse_value(setting, part, setting.option) for part in parts])


def _replicas(text: str) -> tuple[int, ...]:
    low, dots, high = text.partition("..")
    parts = [low, high] if dots else text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= MOST_REPLICAS for part in parts):
        raise ConfigError(
            f"--replicas: expected whole numbers from 1 to {MOST_REPLICAS}, or a range such as 1..4, got {text!r}"
        )
    if not dots:
        return _distinct("--replicas", [int(part) for part in parts])
    if int(low) > int(high):
        raise ConfigError(f"--replicas: the range {text} is empty")
    return tuple(range(int(low), int(high) + 1))


def _choices(option: str, text: str, known: Mapping[str, object]) -> tuple[str, ...]:
    return _distinct(option, [parse_choice(option, part.strip(), known) for part in text.split(",")])


def _optional(given: Mapping[str, Any], key: str, known: Mapping[str, object]) -> tuple[str | None, ...]:
    """The values of a flag, None where it was not given."""
    return (None,) if given[key] is None else _choices(f"--{key}", given[key], known)


def _numbers(option: str, text: str, *, single: bool = False) -> tuple[float, ...]:
    values = [_number(part) for part in ([text] if single else text.split(","))]
    if not all(value > 0 for value in values):
        expected = "a number above 0" if single else "numbers above 0, separated by commas"
        raise ConfigError(f"{option}: expected {expected}, got {text!r}")
    return _distinct(option, values)


def _hedges(text: str) -> tuple[float, ...]:
    values = [_number(part) for part in text.split(",")]
    if not all(value == 0 or value >= 1 for value in values):
        raise ConfigError(f"--hedge: expected 0, or numbers from 1, separated by commas, got {text!r}")
    return _distinct("--hedge", values)


def _number(text: str) -> float:
    """A finite number; nan for anything else."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _distinct(option: str, values: list[T]) -> tuple[T, ...]:
    if len(set(values)) != len(values):
        raise ConfigError(f"{option}: a value is given twice")
    return tuple(values)
