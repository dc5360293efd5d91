"""The flags of `headrace bench serve`, and the requests that they ask for. Names are those of `vllm bench serve` where
it has the same."""

import argparse
import math
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.tools.bench.runner import COMPLETIONS, PREFILL
from headrace.tools.bench.summary import LatencyLimits
from headrace.tools.bench.workload import BURST, Lengths, PlannedRequest, arrival_times, cut, from_texts, synthetic
from headrace.tools.output import check_output
from headrace.tools.simulate.trace_file import read_trace

DESCRIPTION = "send load to a running server and measure what its clients see"
USAGE = "headrace bench serve URL [flags]"
NUM_PROMPTS = 100
INPUT_LEN = Lengths(512, 512)
OUTPUT_LEN = Lengths(64, 64)
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
MOST_TOKENS = 16_000_000


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Flags, checked; the fields are named as they are."""

    url: str
    model: str | None = None
    endpoint: str | None = None
    request_rate: float | None = None
    """Requests a second, BURST for all at once; None: as the trace, or max_concurrency."""
    burstiness: float = 1.0
    max_concurrency: int = 0
    """0: any number."""
    trace: Path | None = None
    speedup: float = 1.0
    prompts: Path | None = None
    num_prompts: int | None = None
    input_len: Lengths = INPUT_LEN
    output_len: Lengths | None = None
    """None: as the trace, or OUTPUT_LEN."""
    max_input_len: int | None = None
    prefix_len: int = 0
    num_prefixes: int = 1
    num_warmups: int = 2
    seed: int = msgspec.field(default_factory=lambda: secrets.randbelow(1 << 31))
    temperature: float = 0.0
    stop_at_eos: bool = False
    timeout: float = 600.0
    """Seconds."""
    ttft_slo: float | None = None
    """Seconds, as the next one."""
    tpot_slo: float | None = None
    percentiles: tuple[float, ...] = PERCENTILES
    json: Path | None = None
    plot: Path | None = None

    @property
    def limits(self) -> LatencyLimits:
        """Of a good request."""
        return LatencyLimits(self.ttft_slo, self.tpot_slo)

    @property
    def open_loop(self) -> bool:
        """Whether requests have times, instead of following each other."""
        return self.request_rate is not None or self.trace is not None or not self.max_concurrency


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the positional URL and all flags."""
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8001")
    parser.add_argument("--model", metavar="NAME", help="as the server names it (default: its only one)")
    _flag(parser, "--endpoint", "PATH", _endpoint, _ENDPOINT_HELP)
    when = parser.add_argument_group("arrivals")
    _flag(when, "--request-rate", "R", _rate, "requests a second; inf: all at once (default: inf)")
    _flag(when, "--burstiness", "X", _above_zero, _BURSTINESS_HELP)
    _flag(when, "--max-concurrency", "N", _whole, _CONCURRENCY_HELP)
    _flag(when, "--trace", "FILE", _path, _TRACE_HELP)
    _flag(when, "--speedup", "X", _above_zero, "replay the trace so many times as fast (default: 1)")
    what = parser.add_argument_group("requests")
    _flag(what, "--num-prompts", "N", _whole, f"requests (default: {NUM_PROMPTS}, or all of the trace)")
    _flag(what, "--input-len", "N|A-B", _lengths, f"prompt tokens, uniform from A to B (default: {INPUT_LEN})")
    _flag(what, "--output-len", "N|A-B", _lengths, f"tokens to generate (default: {OUTPUT_LEN}, or as the trace)")
    _flag(what, "--prompts", "FILE", _path, "texts, one a line, in place of random token ids")
    _flag(what, "--max-input-len", "N", _whole, "cut longer prompts of a trace to so many tokens")
    _flag(what, "--prefix-len", "N", _whole_or_zero, "first tokens that prompts share (default: 0)")
    _flag(what, "--num-prefixes", "N", _whole, "different shared prefixes (default: 1)")
    _flag(what, "--temperature", "X", _number, "of sampling (default: 0)")
    what.add_argument(
        "--stop-at-eos", action="store_true", help="let the model end its text; without, lengths are as asked"
    )
    how = parser.add_argument_group("measurement")
    _flag(how, "--num-warmups", "N", _whole_or_zero, "requests before the start that do not count (default: 2)")
    _flag(how, "--seed", "N", _whole_or_zero, _SEED_HELP)
    _flag(how, "--timeout", "SECONDS", _above_zero, "of one request (default: 600)")
    _flag(how, "--ttft-slo", "MS", _milliseconds, "time to first token of a good request, for the goodput")
    _flag(how, "--tpot-slo", "MS", _milliseconds, "time per output token after the first of a good request")
    _flag(how, "--percentiles", "P,P,...", _percentiles, "of the latencies (default: 50,90,95,99)")
    _flag(how, "--json", "FILE", check_output, "also write all figures, and every request, to this file")
    _flag(how, "--plot", "FILE.png", _picture, "also draw them; needs pip install 'headrace[plot]'")


def _flag(
    group: "argparse._ActionsContainer", option: str, metavar: str, read: Callable[[str, str], object], help: str
) -> None:
    """read: gets option and text, and raises ConfigError naming the option."""
    group.add_argument(option, metavar=metavar, type=partial(read, option), help=help)


_ENDPOINT_HELP = (
    f"{COMPLETIONS} or {PREFILL}, which computes the prompt alone and drops its KV (default: the latter for a server "
    "of role prefill)"
)
_BURSTINESS_HELP = "shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier (default: 1)"
_CONCURRENCY_HELP = (
    "the most open requests. Alone: so many clients, each sends when its last request has ended. With arrivals: what "
    "is due waits in the client, which counts"
)
_TRACE_HELP = (
    "send at the timestamps of a trace, with its lengths and shared prefixes: JSON lines as of Mooncake, or CSV "
    "(FILE.csv), as in headrace simulate. With --request-rate: its requests, at that rate"
)
_SEED_HELP = (
    "of arrivals, lengths and tokens (default: random, so that a second run does not find its prompts in the server's "
    "prefix cache)"
)


def parse(given: Mapping[str, Any], url: str) -> Options:
    """Flags as they were read, None for those that were not given. url: as checked. Raises ConfigError for flags that
    exclude or need each other."""
    read = {name: value for name in Options.__struct_fields__ if (value := given[name]) is not None}
    options = Options(**{**read, "url": url})
    _check_together(given, options)
    return options


def _check_together(given: Mapping[str, Any], options: Options) -> None:
    """Raises ConfigError for flags that exclude or need each other."""
    if options.trace is not None and options.prompts is not None:
        raise ConfigError("--trace and --prompts both say what the prompts are; give one of them")
    source = "--trace" if options.trace is not None else "--prompts" if options.prompts is not None else None
    for name in ("input_len", "prefix_len", "num_prefixes"):
        if source and given[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning beside {source}, which has the prompts")
    if given["speedup"] is not None and (options.trace is None or options.request_rate is not None):
        raise ConfigError("--speedup needs the timestamps of a --trace, without --request-rate")
    if given["max_input_len"] is not None and options.trace is None:
        raise ConfigError("--max-input-len cuts prompts of a --trace; write --input-len")
    if given["burstiness"] is not None and options.request_rate in (None, BURST):
        raise ConfigError("--burstiness needs --request-rate, whose gaps it shapes")
    if options.prefix_len > options.input_len.low:
        raise ConfigError(f"--prefix-len {options.prefix_len} is longer than the shortest prompt of --input-len")


def planned(options: Options) -> list[PlannedRequest]:
    """The requests by arrival. Raises ConfigError for a file that cannot be read."""
    draw = random.Random(options.seed)
    count = options.num_prompts or NUM_PROMPTS
    output = options.output_len or OUTPUT_LEN
    if options.trace is not None:
        requests = _from_trace(options, options.trace, draw)
    elif options.prompts is not None:
        requests = from_texts(_read_texts(options.prompts), count, output, draw)
    else:
        lengths, prefixes = options.input_len, options.num_prefixes
        requests = synthetic(count, lengths, output, options.prefix_len, prefixes, draw)
    if options.request_rate is None and (options.trace is not None or options.max_concurrency):
        return requests  # as the trace, or one after the other
    times = arrival_times(len(requests), options.request_rate or BURST, options.burstiness, draw)
    return [msgspec.structs.replace(request, due_s=at) for request, at in zip(requests, times, strict=True)]


def _from_trace(options: Options, path: Path, draw: random.Random) -> list[PlannedRequest]:
    trace = read_trace(path, options.num_prompts)
    timed = options.request_rate is None
    requests = []
    for each in trace:
        at = each.arrival_s / options.speedup if timed else 0.0
        output = options.output_len.draw(draw) if options.output_len else max(1, each.output_tokens)
        requests.append(PlannedRequest(at, tuple((text, tokens) for text, tokens in each.segments), "", output))
    return requests if options.max_input_len is None else cut(requests, options.max_input_len)


def _read_texts(path: Path) -> list[str]:
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    if not texts:
        raise ConfigError(f"{path.name} has no prompts: it has to have one a line")
    return texts


def arrivals_in_words(options: Options) -> str:
    """How requests arrive."""
    most = f", at most {options.max_concurrency} open" if options.max_concurrency else ""
    if options.request_rate == BURST:
        return f"all at once{most}"
    if options.request_rate is not None:
        shape = "Poisson" if options.burstiness == 1 else f"gamma (burstiness {options.burstiness:g})"
        return f"{shape} arrivals at {options.request_rate:g} requests/s{most}"
    if options.trace is not None:
        speed = f" × {options.speedup:g}" if options.speedup != 1 else ""
        return f"arrivals of {options.trace.name}{speed}{most}"
    return f"{options.max_concurrency} clients, one request each" if options.max_concurrency else "all at once"


def lengths_in_words(options: Options, *, generating: bool) -> str:
    """What requests ask for. generating: outputs too, as of check_lengths()."""
    output = f"{options.output_len or OUTPUT_LEN} tokens out" if generating else "the first token alone"
    if options.trace is not None:
        cut_to = f" cut to {options.max_input_len} tokens" if options.max_input_len else ""
        own = generating and options.output_len is None
        return f"prompts of {options.trace.name}{cut_to}, {'its lengths out' if own else output}"
    if options.prompts is not None:
        return f"prompts of {options.prompts.name}, {output}"
    shared = f" ({options.prefix_len} shared, {options.num_prefixes} prefixes)" if options.prefix_len else ""
    return f"{options.input_len} tokens in{shared}, {output}"


def check_lengths(requests: Sequence[PlannedRequest], max_model_len: int, *, generating: bool) -> None:
    """Raises ConfigError if the server cannot take the longest request. generating: it is asked for outputs too."""
    if not max_model_len:
        return
    longest = max(request.input_tokens + (request.output_tokens if generating else 1) for request in requests)
    if longest > max_model_len:
        raise ConfigError(
            f"the longest request has {longest:,} tokens, the model has {max_model_len:,}: write a shorter --input-len "
            "or --output-len; for a trace, --max-input-len cuts its prompts"
        )


def _endpoint(option: str, text: str) -> str:
    if text not in (COMPLETIONS, PREFILL):
        raise ConfigError(f"{option}: expected {COMPLETIONS} or {PREFILL}, got {text!r}")
    return text


def _path(_option: str, text: str) -> Path:
    return Path(text)


def _picture(option: str, text: str) -> Path | None:
    return check_output(option, text, ".png")


def _whole(option: str, text: str) -> int:
    return _bounded(option, text, 1)


def _whole_or_zero(option: str, text: str) -> int:
    return _bounded(option, text, 0)


def _bounded(option: str, text: str, low: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if value < low:
        raise ConfigError(f"{option}: expected a whole number, at least {low}, got {text!r}")
    return value


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{option}: expected a number, at least 0, got {text!r}")
    return value


def _above_zero(option: str, text: str) -> float:
    if (value := _number(option, text)) == 0:
        raise ConfigError(f"{option}: expected a number above 0, got {text!r}")
    return value


def _rate(option: str, text: str) -> float:
    return BURST if text == "inf" else _above_zero(option, text)


def _milliseconds(option: str, text: str) -> float:
    return _above_zero(option, text) / 1000


def _lengths(option: str, text: str) -> Lengths:
    low, dash, high = text.partition("-")
    found = Lengths(_whole(option, low), _whole(option, high if dash else low))
    if found.low > found.high:
        raise ConfigError(f"{option}: the range {text} is empty")
    if found.high > MOST_TOKENS:
        raise ConfigError(f"{option}: expected at most {MOST_TOKENS} tokens, got {text!r}")
    return found


def _percentiles(option: str, text: str) -> tuple[float, ...]:
    values = tuple(_number(option, part.strip()) for part in text.split(","))
    if max(values) > 100:
        raise ConfigError(f"{option}: expected numbers from 0 to 100, got {text!r}")
    return tuple(dict.fromkeys(values))
