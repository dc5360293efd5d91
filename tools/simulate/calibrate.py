"""Measures what forward passes take on a running server: prompts of many lengths while it records a trace of itself.

POST /v1/prefill ×n, one at a time ─┐
GET /debug/trace ───────────────────┴─► per stage and pass: rows, seconds ─► least squares ─► a, b, c + pause
                                        per request: seconds outside its passes ─► latency
"""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from headrace.core.messages.http_prefill import JSON_HEADERS, PREFILL_PATH, PrefillRequest
from headrace.core.types.errors import ConfigError
from headrace.engine.telemetry.speed import fit_terms
from headrace.integrations.http_client import bearer, direct_client
from headrace.scheduler.costs.chunking import Cost
from headrace.server.config.load import load

RECORD_S = 20.0
SHORTEST = 16  # tokens of a prompt
LONGEST_S = 3.0  # of one prompt: longer ones are not tried
LEAST_PASSES = 10
LONGEST_PAUSE_S = 0.005  # between passes of which the later one was ordered in time
OUTLIER = 4.0  # times the median error
LEAST_OUTLIER = 0.02  # relative error that is none
TOKEN_IDS = 200  # every model has as many
TIMEOUT_S = 120.0


class Calibration(msgspec.Struct, frozen=True):
    """What was measured."""

    costs: tuple[Cost, ...]
    """Of each stage."""
    kv_tokens: int
    """Tokens that fit the server's KV pool."""
    latency_s: float
    """Median seconds of a request outside its forward passes: HTTP, and messages between processes."""
    text: str
    """Where it was measured, and how well the costs fit."""


class StagePass(msgspec.Struct, frozen=True):
    """One forward pass on one stage."""

    stage: int
    plan: int
    taken_s: float
    """When the stage turned to it, since the recording began."""
    started_s: float
    """When it had the hidden states of the stage before."""
    ended_s: float
    rows: tuple[tuple[str, int, int], ...]
    """Request id, start and count of every row."""

    @property
    def terms(self) -> tuple[float, float, float]:
        """What fit_terms() takes."""
        squared = sum(count * (2 * start + count) for _, start, count in self.rows)
        return float(squared), float(sum(count for _, _, count in self.rows)), self.ended_s - self.started_s


def calibrate(url: str, environ: Mapping[str, str], record_s: float = RECORD_S) -> Calibration:
    """Measure a server, which computes some prompts meanwhile. environ: names its API key, if it has one. Raises
    ConfigError for a server that cannot be reached, refuses, or computes too little."""
    keys = load({}, environ).server.api_keys
    headers = bearer(keys[0] if keys else "")
    address = url.rstrip("/")
    try:
        with direct_client(base_url=address, headers=headers, timeout=TIMEOUT_S) as client:
            about = _get(client, "/server_info")
            client_s, trace = _record(client, int(about["max_model_len"]), int(about["max_total_num_tokens"]), record_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--calibrate: no answer from {address} ({type(error).__name__})") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ConfigError(f"--calibrate: {address} is no headrace server of this version") from None
    return evaluate(address, stage_passes(trace), client_s, int(about["max_total_num_tokens"]))


def stage_passes(trace: Mapping[str, Any]) -> list[StagePass]:
    """The finished passes of a recording (server/telemetry/trace_report.py), in the order of stages and plans."""
    spans: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event.get("cat") == "plan":
            spans.setdefault((event["pid"], event["args"]["plan"]), []).append(event)
    first = min((pid for pid, _ in spans), default=0)
    found = []
    for (pid, plan), events in sorted(spans.items()):
        steps = [event for event in events if event["name"] != "wait"]
        if len(steps) < 2 or any(step["args"].get("unfinished") for step in steps):
            continue
        rows = tuple((row["rid"], row["start"], row["count"]) for row in steps[0]["args"]["requests"])
        taken, started = min(event["ts"] for event in events), min(step["ts"] for step in steps)
        ended = max(step["ts"] + step["dur"] for step in steps)
        found.append(StagePass(pid - first, plan, taken / 1e6, started / 1e6, ended / 1e6, rows))
    return found


def evaluate(
    address: str, passes: Sequence[StagePass], client_s: Mapping[str, float], kv_tokens: int
) -> Calibration:  # fmt: skip
    """Fit the costs of every stage, and the latency. client_s: seconds of each request as its client saw them. Raises
    ConfigError when there are too few passes."""
    stages = sorted({each.stage for each in passes})
    costs, errors = [], []
    for stage in stages:
        own = [each for each in passes if each.stage == stage]
        if len(own) < LEAST_PASSES:
            raise ConfigError(f"--calibrate: stage {stage} of {address} recorded {len(own)} passes only")
        (a, b, c), off = _fit([each.terms for each in own])
        costs.append((a, b, c + _pause(own)))
        errors += off
    if not stages:
        raise ConfigError(f"--calibrate: {address} recorded no forward pass")
    ordered = sorted(errors)
    text = (
        f"measured on {address} with {len(errors)} passes, off by {statistics.median(ordered):.1%} in the median and "
        f"{ordered[len(ordered) * 9 // 10]:.1%} in the worst tenth"
    )
    return Calibration(tuple(costs), kv_tokens, _latency(passes, client_s), text)


def _pause(passes: Sequence[StagePass]) -> float:
    """Mean seconds from the end of a pass to the next one that is there already. It is short, but under load a server
    falls behind by as much in every pass."""
    pauses = [after.taken_s - before.ended_s for before, after in pairwise(passes)]
    short = [pause for pause in pauses if 0 <= pause < LONGEST_PAUSE_S]
    return statistics.fmean(short) if short else 0.0


def _fit(terms: Sequence[tuple[float, float, float]]) -> tuple[Cost, list[float]]:
    """The cost, and how far each pass is off, relative to its time. Passes that are off by far more than most were held
    up by something else: they do not count in a second fit."""
    off = _errors(fit_terms(terms), terms)
    bound = max(OUTLIER * statistics.median(off), LEAST_OUTLIER)
    cost = fit_terms([row for row, error in zip(terms, off, strict=True) if error <= bound])
    return cost, _errors(cost, terms)


def _errors(cost: Cost, terms: Sequence[tuple[float, float, float]]) -> list[float]:
    a, b, c = cost
    return [abs(a * squared + b * tokens + c - seconds) / seconds for squared, tokens, seconds in terms]


def _latency(passes: Sequence[StagePass], client_s: Mapping[str, float]) -> float:
    windows: dict[str, tuple[float, float]] = {}
    for each in passes:
        for rid, _, _ in each.rows:
            began, ended = windows.get(rid, (each.started_s, each.ended_s))
            windows[rid] = min(began, each.started_s), max(ended, each.ended_s)
    outside = [client_s[rid] - (ended - began) for rid, (began, ended) in windows.items() if rid in client_s]
    return max(0.0, statistics.median(outside)) if outside else 0.0


def _record(
    client: httpx.Client, max_model_len: int, kv_tokens: int, record_s: float
) -> tuple[dict[str, float], dict[str, Any]]:
    """Compute prompts one after the other while the server records. Returns the clients' seconds of the prompts that
    were computed wholly within the recording, and the trace."""
    longest = min(max_model_len - 1, kv_tokens // 2)
    draw = random.Random()
    _prefill(client, draw, min(SHORTEST, longest))  # so that nothing is slow because it is the first
    seconds: dict[str, float] = {}
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(_get, client, f"/debug/trace?seconds={record_s}")
        time.sleep(0.05 * record_s)  # until the server records
        until = began + 0.9 * record_s
        length, jitter = float(SHORTEST), 1.0
        while time.monotonic() < until:
            tokens = max(1, min(longest, int(length * jitter)))
            rid, taken = _prefill(client, draw, tokens)
            seconds[rid] = taken
            length *= 2
            if length > longest or taken > LONGEST_S or time.monotonic() + 2.5 * taken > until:
                length, jitter = float(SHORTEST), draw.uniform(0.7, 1.4)
        return seconds, recording.result()


def _prefill(client: httpx.Client, draw: random.Random, tokens: int) -> tuple[str, float]:
    rid = f"calibrate-{draw.randrange(1 << 62):x}"
    ids = [draw.randrange(1, TOKEN_IDS) for _ in range(tokens)]
    body = PrefillRequest(rid=rid, prompt_token_ids=ids, handoff="none", temperature=0.0, max_tokens=1)
    started = time.monotonic()
    _checked(client.post(PREFILL_PATH, content=body.encoded(), headers=JSON_HEADERS))
    return rid, time.monotonic() - started


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    found: dict[str, Any] = _checked(client.get(path)).json()
    return found


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code != 200:
        text = " ".join(response.text.split())[:200]
        raise ConfigError(f"--calibrate: {response.url.path} answered {response.status_code}: {text}")
    return response
