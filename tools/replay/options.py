"""The flags of `headrace replay`."""

import argparse

from headrace.server.config.flags import add_flag
from headrace.tools.simulate import options as simulate_options

DESCRIPTION = (
    "run the scheduler over a recording of headrace serve --record: the same decisions again, why a request waited, "
    "what another configuration would have done"
)
USAGE = (
    "headrace replay FILE [--verbose] [--at SECONDS] [--step]\n"
    "       headrace replay FILE why REQUEST\n"
    "       headrace replay FILE diff [--policy slo] [--replicas 2] ...\n"
    "       headrace replay FILE picture -o OUT.png|OUT.html"
)
_WHY = "every decision that touched a request, and what it waited for, in sentences"
_DIFF = "simulate the recorded arrivals with other settings, beside what was recorded"
_PICTURE = "draw queues, passes and requests over time"
DIFFED = tuple(setting for setting in simulate_options.REPLAYED if setting.key not in ("page-size", "pp"))
"""Settings of `headrace serve` that a counterfactual may change: not those that what was measured depends on."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the positional FILE, the flags, and the questions with theirs."""
    parser.add_argument("recording", metavar="FILE", help="a recording, or an incident that was written out of one")
    parser.add_argument("--verbose", action="store_true", help="also print the digest of every second")
    parser.add_argument("--at", metavar="SECONDS", help="print the state so many seconds after the first call")
    parser.add_argument(
        "--step", action="store_true", help="go through calls, from --at on; not on a terminal: list them"
    )
    questions = parser.add_subparsers(dest="question", metavar="why | diff | picture", prog=f"{parser.prog} FILE")
    why = questions.add_parser("why", help=_WHY, description=_WHY, allow_abbrev=False)
    why.add_argument("request", metavar="REQUEST", help="its id, or a beginning of it that no other has")
    picture = questions.add_parser("picture", help=_PICTURE, description=_PICTURE, allow_abbrev=False)
    picture.add_argument("-o", "--output", metavar="OUT.png|OUT.html", required=True, help="the file to write")
    picture.add_argument("--from", dest="start", metavar="SECONDS", help="draw what was from then on (default: all)")
    picture.add_argument("--to", dest="end", metavar="SECONDS", help="and until then")
    usage = "headrace replay FILE diff [flags]"
    diff = questions.add_parser("diff", help=_DIFF, description=_DIFF, usage=usage, allow_abbrev=False)
    _add_diff(diff)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    ours = parser.add_argument_group("replay", "As in headrace simulate. Values with commas are all simulated.")
    ours.add_argument("--replicas", metavar="N,N,...", help="servers (default: as recorded)")
    ours.add_argument("--router", metavar="NAME,...", help=simulate_options.ROUTER_HELP)
    ours.add_argument("--retries", metavar="N", help=simulate_options.RETRIES_HELP)
    ours.add_argument("--json", metavar="FILE", help="also write all figures to this file")
    server = parser.add_argument_group("server", "As in headrace serve; what is not given is as recorded.")
    for setting in DIFFED:
        add_flag(server, setting)
