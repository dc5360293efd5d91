"""The scheduler's metrics as data: names, kinds, help, labels. The front end puts its prefix before the names."""

from typing import get_args

from headrace.core.stats import SECONDS, TOKENS, MetricSpec
from headrace.core.types.errors import (
    CANCELLED,
    DRAINING,
    NOT_CACHED,
    NOT_READY,
    QUEUE_FULL,
    SLO_UNREACHABLE,
    TICKET_IN_USE,
    TOO_LONG,
)
from headrace.core.types.kv.kv_tiers import TIERS
from headrace.core.types.ranks.coordinate import CutResult
from headrace.core.types.requests.outcomes import FAILED, OTHER, REFUSED
from headrace.core.types.requests.remote_prefill import PREFILL_REASONS
from headrace.scheduler.requests.phase import Phase

HINTS = ("retain", "prefetch", "demote", "release")
QUEUES = (Phase.BOOTSTRAP, Phase.WAITING, Phase.RUNNING, Phase.INFLIGHT, Phase.FETCHING, Phase.GENERATING)
RATIOS = (0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
ERRORS = (-0.9, -0.75, -0.5, -0.35, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.0, 5.0)
WAIT_TOKENS = (64, 256, 1024, 4096, 16384, 65536)  # lengths of prompts whose wait is reported
SALTED, ANONYMOUS = "salted", "anonymous"  # a salt is a secret, and no label
OVERLOADS = (("tokens",), ("requests",), ("seconds",), ("predicted_ttft",), ("objective",))
ADMISSION = "admission"  # where requests fail before they have a phase
REFUSED_AT_ADMISSION = (
    CANCELLED,
    DRAINING,
    NOT_CACHED,
    NOT_READY,
    QUEUE_FULL,
    SLO_UNREACHABLE,
    TICKET_IN_USE,
    TOO_LONG,
    "invalid_token",
    "invalid_value",
    "no_prefill",
    "rid_in_use",
)
REMOTE = (Phase.WAITING, Phase.FETCHING)  # phases in which a prefill server may refuse a request
FAILURES = (
    *((ADMISSION, reason) for reason in REFUSED_AT_ADMISSION),
    *((phase.value, reason) for phase in QUEUES for reason in (*FAILED, CANCELLED)),
    *((phase.value, reason) for phase in REMOTE for reason in REFUSED if reason != OTHER),
)
DROPPED = (
    "duplicate_ack",
    "duplicate_answer",
    "late_error",
    "old_stage",
    "stale_generation",
    "unknown_copy",
    "unknown_lease",
    "unknown_plan",
    "unknown_prefill",
    "unknown_request",
    "unknown_rid",
    "unknown_session",
    "unknown_ticket",
    "unknown_trace",
)
TIER_RESULTS = ("stored", "loaded", "store_failed", "load_failed", "dropped", "restored")
_BY_QUEUE = tuple((phase.value,) for phase in QUEUES)

CATALOG = (
    MetricSpec(
        "request_failures_total",
        "counter",
        "Requests that the scheduler has failed, by reason and the phase that they left (admission: it refused them). "
        "Those whose prompt goes to another prefill server then are among them.",
        ("phase", "reason"),
        FAILURES,
    ),
    MetricSpec("queue_requests", "gauge", "Requests by phase.", ("queue",), _BY_QUEUE),
    MetricSpec("queue_tokens", "gauge", "Prompt tokens of the requests in a phase.", ("queue",), _BY_QUEUE),
    MetricSpec("unplanned_tokens", "gauge", "Prompt tokens admitted and not yet planned."),
    MetricSpec(
        "unplanned_seconds", "gauge", "Predicted seconds of computing those of them that are not in the prefix cache."
    ),
    MetricSpec(
        "prefill_cost_seconds",
        "gauge",
        "Predicted seconds of computing a prompt: so many per token, and so many per squared token.",
        ("per",),
    ),
    MetricSpec(
        "predicted_wait_seconds",
        "gauge",
        "Predicted seconds that a prompt of so many tokens, none of them cached, would wait if it came now.",
        ("tokens",),
        tuple((str(tokens),) for tokens in WAIT_TOKENS),
    ),
    MetricSpec(
        "delayed_requests",
        "gauge",
        "Requests that a prompt of so many tokens, none of them cached, would delay if it came now: those that decode "
        "while it is computed, prompts that wait behind it, and those that are expected to come until these are done.",
        ("tokens",),
        tuple((str(tokens),) for tokens in WAIT_TOKENS),
    ),
    MetricSpec(
        "cost_model_trusted",
        "gauge",
        "1 once what is predicted are seconds, since a plan was computed or the stages have measured their speed, and "
        "unless the model is stale.",
    ),
    MetricSpec("cost_model_stale", "gauge", "1 while predictions are wrong, and go by tokens alone."),
    MetricSpec(
        "predicted_ttft_seconds",
        "histogram",
        "Time to first token that was predicted for admitted requests at their arrival.",
        (),
        ((),),
        SECONDS,
    ),
    MetricSpec(
        "ttft_prediction_error",
        "histogram",
        "That prediction less the actual time, divided by the actual time; waiting for a peer counts as actual time.",
        (),
        ((),),
        ERRORS,
    ),
    MetricSpec(
        "promises_total",
        "counter",
        "With --promise: requests whose time to first token was promised, by what became of it: kept, broken, or void, "
        "as they ended before their first token and within the time.",
        ("result",),
        (("kept",), ("broken",), ("void",)),
    ),
    MetricSpec(
        "promised_ttft_seconds",
        "histogram",
        "Bounds of the time to first token that were promised.",
        (),
        ((),),
        SECONDS,
    ),
    MetricSpec(
        "promised_ttft_ratio",
        "histogram",
        "Promised bound divided by the actual time to first token: how tight bounds are; below 1, broken.",
        (),
        ((),),
        RATIOS,
    ),
    MetricSpec(
        "ttft_bound_seconds",
        "gauge",
        "Bound that a prompt of so many tokens, none of them cached, would be promised if it came now.",
        ("tokens",),
    ),
    MetricSpec(
        "forecast_queue_seconds",
        "gauge",
        "Median (0.5) and 99th percentile (0.99) over the next minute of the predicted seconds of computing what waits "
        "with the servers that there are (same), and if one more took half of what comes to this one (one_more).",
        ("servers", "quantile"),
    ),
    MetricSpec("forecast_age_seconds", "gauge", "Seconds since the state that the last forecast is from."),
    MetricSpec(
        "forecasts_total",
        "counter",
        "Forecasts that copies of the scheduler were to make.",
        ("result",),
        (("made",), ("failed",)),
    ),
    MetricSpec(
        "forecast_fork_seconds_total",
        "counter",
        "Seconds for which the scheduler was held up to copy it for forecasts.",
    ),
    MetricSpec("forecast_cpu_seconds_total", "counter", "CPU seconds of the copies that have made them.", (), ((),)),
    MetricSpec(
        "prefill_decisions_total",
        "counter",
        "Prompts by where --remote cost has them computed, and why: at a prefill server (cheaper_there, unknown_cost; "
        "probe: it has got none for 30 s) or here (cheaper_here; cached_here: at least half of the prompt is cached).",
        ("reason",),
        tuple((reason,) for reason in PREFILL_REASONS),
    ),
    MetricSpec(
        "overload_refusals_total",
        "counter",
        "Requests refused with 429, by what would have been exceeded: tokens, requests or seconds queued, "
        "predicted_ttft (the server's limit), objective (the request's).",
        ("reason",),
        OVERLOADS,
    ),
    MetricSpec(
        "tenant_seconds_total",
        "counter",
        "Predicted seconds of the prefill that was computed, cached tokens excluded, by name of the API key; "
        "anonymous: keys without a name, salted: those with a cache salt, other: all names beyond the first 64.",
        ("tenant",),
        ((ANONYMOUS,), (SALTED,)),
    ),
    MetricSpec(
        "phase_duration_seconds", "histogram", "Time that requests spent in a phase.", ("phase",), _BY_QUEUE, SECONDS
    ),
    MetricSpec("prompt_tokens_total", "counter", "Prompt tokens of the requests that were started.", (), ((),)),
    MetricSpec("cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", (), ((),)),
    MetricSpec(
        "open_passes_total",
        "counter",
        "Passes with pieces of open prompts, by how they ended: computed, or cancelled since others came.",
        ("end",),
        (("computed",), ("cancelled",)),
    ),
    MetricSpec(
        "open_tokens_total",
        "counter",
        "Tokens of open prompts that were computed; no prompt tokens of requests.",
        (),
        ((),),
    ),
    MetricSpec("generated_tokens_total", "counter", "Tokens sampled, first tokens among them.", (), ((),)),
    MetricSpec("kv_pages", "gauge", "KV pages by state.", ("state",), (("free",), ("cached",), ("leased",))),
    MetricSpec(
        "state_slots",
        "gauge",
        "Slots for the states of requests, by use; 0 for models without.",
        ("use",),
        (("free",), ("checkpoint",), ("leased",)),
    ),
    MetricSpec(
        "kv_tier_pages", "gauge", "KV pages with a copy in the host or disk tier, and free slots.", ("tier", "state")
    ),
    MetricSpec(
        "kv_tier_pages_total",
        "counter",
        "KV pages copied to (stored) or from (loaded) the host or disk tier, failures, copies given up (dropped), and "
        "pages found on disk at the start (restored).",
        ("tier", "result"),
        tuple((tier, result) for tier in TIERS for result in TIER_RESULTS),
    ),
    MetricSpec(
        "kv_tier_hit_tokens_total",
        "counter",
        "Prompt tokens that were loaded from a tier, to be computed behind or handed over.",
        ("tier",),
        tuple((tier,) for tier in TIERS),
    ),
    MetricSpec("retained_pages", "gauge", "KV pages that KV hints keep from eviction."),
    MetricSpec(
        "kv_hints_total",
        "counter",
        "KV hints by action, and by whether they were granted for any page.",
        ("action", "result"),
        tuple((action, result) for action in HINTS for result in ("granted", "refused")),
    ),
    MetricSpec("held_requests", "gauge", "Requests that are computed before a peer reserves their ticket."),
    MetricSpec("held_pages", "gauge", "KV pages that the prompts of those requests take."),
    MetricSpec("quarantined_pages", "gauge", "KV pages of ended requests that a prefill server may still write into."),
    MetricSpec("leases_expired_total", "counter", "Held requests that no peer reserved in time.", (), ((),)),
    MetricSpec("plan_duration_seconds", "histogram", "Time the last stage spent on a plan.", (), ((),), SECONDS),
    MetricSpec("plan_tokens", "histogram", "Tokens in a plan.", (), ((),), TOKENS),
    MetricSpec("plan_rows", "histogram", "Rows in a plan.", (), ((),), ROWS),
    MetricSpec("plans_in_flight", "gauge", "Plans ordered and not done."),
    MetricSpec("plans_total", "counter", "Plans ordered.", (), ((),)),
    MetricSpec(
        "overlap_passes_total",
        "counter",
        "With --overlap: passes of all replicas that were cut in halves, and those that were not because a replica was "
        "idle, had fewer tokens than the threshold, or was so short that its second half would be empty.",
        ("result",),
        tuple((result,) for result in get_args(CutResult)),
    ),
    MetricSpec("pipeline_active_seconds_total", "counter", "Time with at least one plan in flight.", (), ((),)),
    MetricSpec(
        "stage_bubble_seconds_total",
        "counter",
        "Time with a plan in flight in which this stage computed none.",
        ("stage",),
    ),
    MetricSpec("preemptions_total", "counter", "Requests sent back to the queue for want of pages.", (), ((),)),
    MetricSpec(
        "refetches_total",
        "counter",
        "Preempted requests whose KV had come from a prefill server: it was fetched again, most of it was still cached "
        "here, or fetching it failed.",
        ("result",),
        (("fetched",), ("cached",), ("failed",)),
    ),
    MetricSpec(
        "resumed_prompts_total",
        "counter",
        "Prompts that another prefill server, or this one, has gone on with from KV that had come before one failed.",
        (),
        ((),),
    ),
    MetricSpec(
        "resumed_tokens_total",
        "counter",
        "Their tokens whose KV had come, and was not sent again.",
        (),
        ((),),
    ),
    MetricSpec(
        "dropped_messages_total",
        "counter",
        "Stale, duplicate or unknown messages, by reason.",
        ("reason",),
        tuple((reason,) for reason in DROPPED),
    ),
    MetricSpec("reservations_waiting", "gauge", "Peers' reservations whose prompt has not come."),
    MetricSpec("peers", "gauge", "Decode peers whose session is open."),
    MetricSpec("prefill_servers", "gauge", "Prefill servers that are up."),
    MetricSpec("integrity_errors", "gauge", "Problems found by the last integrity check."),
    MetricSpec("metadata_rows_in_use", "gauge", "Metadata rows held by requests."),
)
