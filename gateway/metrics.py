"""What a gateway counts and measures, for /metrics, and what its decode engines say of where prompts came from."""

import re
from collections.abc import Iterable
from typing import Literal, get_args

from headrace.core.stats import Counters, Histograms, MetricSpec, Sample, Stats
from headrace.core.types.requests.remote_prefill import PREFILL_REASONS, PrefillDecision
from headrace.gateway.sglang_nixl.rooms import OUTCOMES as ROOM_OUTCOMES
from headrace.gateway.vllm_nixl.leases import ENDS, NOTICES
from headrace.server.telemetry import catalog

RecomputeReason = Literal[
    "different_prompts",  # a list of them: one kv_transfer_params object has the KV of one prompt
    "adapter",  # a LoRA adapter, whose KV is not that of the model
    "beam_search",  # its beams are requests of their own
    "echo",  # the decode engine needs the logits of the prompt
    "media",  # images, audio, embeddings: not only tokens
    "prompt_logprobs",  # the decode engine needs the logits of the prompt
    "suffix",  # the decode engine puts prompt and suffix together, and POST /tokenize does not
    "truncation",  # the decode engine cuts the prompt
    "pool_too_small",  # the prompt is longer than --pool-tokens
    "no_kv",  # the prefill server had no room for a token after the prompt, and sent none
    "prefill_failed",  # no prefill server could compute it, under --fallback recompute
    "never",  # under --remote never
    "cheaper_here",  # under --remote cost: it adds less waiting at the decode engine
    "cached_here",  # likewise, and at least half of it is in the decode engine's prefix cache
]
"""Why the decode engine computes a prompt itself."""

RECOMPUTE_REASONS: tuple[RecomputeReason, ...] = get_args(RecomputeReason)
PREFIX = "gateway_"
PHASES = ("tokenize", "prefill", "send")
HANDOFFS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "gateway_handoffs_total",
        "counter",
        "Requests whose prompt's KV a decode engine was told to read.",
    ),
    MetricSpec(
        "gateway_recomputed_total",
        "counter",
        "Requests that were answered without KV, so that the decode engine computes the prompt, by reason.",
        ("reason",),
        tuple((reason,) for reason in RECOMPUTE_REASONS),
    ),
    MetricSpec(
        "gateway_prefill_decisions_total",
        "counter",
        "Prompts by where --remote cost has them computed, and why: at a prefill server (cheaper_there, unknown_cost; "
        "probe: it has got none for 30 s) or by the decode engine (cheaper_here; cached_here: at least half of it is "
        "cached).",
        ("reason",),
        tuple((reason,) for reason in PREFILL_REASONS),
    ),
    MetricSpec("gateway_tokens_total", "counter", "Tokens of prompts whose KV was handed over."),
    MetricSpec(
        "gateway_phase_seconds",
        "histogram",
        "Seconds of a handoff by phase: tokenize (asking a decode engine for the token ids), prefill (computing the "
        "prompt and loading its KV), send (answering the router).",
        ("phase",),
        tuple((phase,) for phase in PHASES),
    ),
    MetricSpec("gateway_decode_engines_up", "gauge", "Decode engines that answer and fit."),
    MetricSpec(
        "gateway_decode_prompt_tokens_total",
        "counter",
        "Prompt tokens of a decode engine by where their KV came from, as it counts them "
        "(vllm:prompt_tokens_by_source_total): what it computes itself was not handed over.",
        ("engine", "source"),
    ),
)
_THREAD: tuple[MetricSpec, ...] = (
    MetricSpec(
        "paused_seconds_total",
        "counter",
        "Time in which the thread that answers decode engines was due and did not run: stopped, frozen, without a core "
        "or swapped out.",
    ),
)
_EXPORTER: tuple[MetricSpec, ...] = (
    MetricSpec("leases_open", "gauge", "Offers of KV that a decode engine may read."),
    MetricSpec(
        "leases_quarantined",
        "gauge",
        "Offers that ended unread, whose pages wait until they can be read no more.",
    ),
    MetricSpec(
        "leases_ended_total",
        "counter",
        "Offers that have ended, by end.",
        ("end",),
        tuple((end,) for end in ENDS),
    ),
    MetricSpec(
        "notices_total",
        "counter",
        "Notices of decode engines, by kind: late ones are of offers that have ended, unknown ones of none.",
        ("kind",),
        tuple((kind,) for kind in NOTICES),
    ),
    MetricSpec("tokens_offered_total", "counter", "Tokens of prompts whose KV was offered."),
    MetricSpec("tokens_unread_total", "counter", "Tokens of offers that ended unread."),
    MetricSpec("handshakes_total", "counter", "Handshakes that the side channel has answered."),
    MetricSpec("nixl_agents", "gauge", "NIXL agents: more than one while offers of an earlier one are open."),
)
_ROOMS: tuple[MetricSpec, ...] = (
    MetricSpec("rooms_open", "gauge", "Rooms of SGLang decode engines that have not ended."),
    MetricSpec(
        "rooms_ended_total",
        "counter",
        "Rooms of SGLang decode engines that have ended, by outcome.",
        ("outcome",),
        tuple((outcome,) for outcome in ROOM_OUTCOMES),
    ),
    MetricSpec(
        "tokens_written_total",
        "counter",
        "Tokens whose KV was written into SGLang decode engines, added up over their ranks.",
    ),
)
_SHARED = (
    "build_info",
    "kv_pages",
    "http_requests_total",
    "http_request_duration_seconds",
    "requests_total",
    "prefill_retries_total",
    "prefill_retried_requests_total",
    "prefill_servers_up",
    "connections",
    "connections_closed_total",
    "accept_failures_total",
    "http_body_bytes",
    "http_bodies_refused_total",
)
_PROMPT_TOKENS = re.compile(r'^vllm:prompt_tokens_by_source_total\{[^}\n]*\bsource="(\w+)"[^}\n]*\} ([0-9.e+]+)$', re.M)


OWN_CATALOG: tuple[MetricSpec, ...] = (
    *HANDOFFS,
    *(
        MetricSpec(f"{PREFIX}{one.name}", one.kind, one.help, one.labels, one.zeros)
        for one in (*_THREAD, *_EXPORTER, *_ROOMS)
    ),
)
"""Metrics that gateways alone have."""
GATEWAY_CATALOG: tuple[MetricSpec, ...] = (
    *OWN_CATALOG,
    *(spec for spec in catalog.CATALOG if spec.name in _SHARED),
    *catalog.PROCESSES,
)
"""All metrics of a gateway: its own, and those of its HTTP server and process."""


class GatewayMetrics:
    """Counters and histograms of handoffs. Used by the event loop only."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._histograms = Histograms()
        self._prompt_tokens: dict[tuple[str, str], float] = {}

    def handed_over(self, tokens: int) -> None:
        """Count an answer with KV."""
        self._counters.add("gateway_handoffs_total")
        self._counters.add("gateway_tokens_total", tokens)

    def recomputed(self, reason: RecomputeReason) -> None:
        """Count an answer without KV."""
        self._counters.add("gateway_recomputed_total", labels=(reason,))

    def decided(self, decision: PrefillDecision) -> None:
        """Count where a prompt is computed."""
        self._counters.add("gateway_prefill_decisions_total", labels=(decision.reason,))

    def took(self, phase: str, seconds: float) -> None:
        """Count the time of a phase."""
        self._histograms.observe("gateway_phase_seconds", seconds, (phase,))

    def take_engine_metrics(self, url: str, text: str) -> None:
        """Note what GET /metrics of a decode engine says."""
        found: dict[tuple[str, str], float] = {}
        for source, value in _PROMPT_TOKENS.findall(text):
            found[url, source] = found.get((url, source), 0.0) + float(value)
        self._prompt_tokens |= found

    def statistics(self) -> Stats:
        """A snapshot."""
        engines = (
            Sample("gateway_decode_prompt_tokens_total", value, labels) for labels, value in self._prompt_tokens.items()
        )
        return Stats((*self._counters.snapshot(), *engines), self._histograms.snapshot())


def in_catalog(found: Iterable[Stats]) -> list[Stats]:
    """What /metrics of a gateway shows of these."""
    names = {spec.name for spec in GATEWAY_CATALOG}
    return [
        Stats(
            tuple(one for one in stats.samples if one.name in names),
            tuple(one for one in stats.histograms if one.name in names),
        )
        for stats in found
    ]


def with_prefix(stats: Stats) -> Stats:
    """Statistics of the exporter or of rooms, under the names of the catalog."""
    return Stats(tuple(Sample(f"{PREFIX}{one.name}", one.value, one.labels) for one in stats.samples))
