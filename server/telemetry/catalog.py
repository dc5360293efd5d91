"""All metrics of a server, by the part that counts them. The scheduler's: headrace.scheduler.telemetry.metrics."""

from collections.abc import Iterable

from headrace.core.stats import TOKENS, MetricSpec
from headrace.core.types.requests.audits import AUDIT_RESULTS
from headrace.core.types.requests.kv_return import RETURN_REASONS
from headrace.core.types.requests.outcomes import ENDS
from headrace.scheduler.telemetry.metrics import CATALOG as SCHEDULER
from headrace.server.routing.failover import MOVE_REASONS
from headrace.server.telemetry import label_values
from headrace.server.telemetry.engine_gauges import ENGINE_GAUGES
from headrace.server.telemetry.label_values import PROMPT_ROUTES, STATUSES, UNKNOWN_ROUTE

# The buckets of vLLM, with finer ones below them.
E2E_SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)


def _each(values: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Label values of a metric with one label."""
    return tuple((value,) for value in values)


TRANSFER: tuple[MetricSpec, ...] = (
    MetricSpec(
        "bytes_sent_total",
        "counter",
        "Bytes of KV sent to peers, by transfer backend.",
        ("backend",),
        _each(label_values.BACKENDS),
    ),
    MetricSpec("chunks_sent_total", "counter", "KV chunks sent to peers."),
    MetricSpec("unacked_bytes", "gauge", "Bytes of KV sent to peers and not yet acknowledged."),
    MetricSpec("queued_chunks", "gauge", "KV chunks waiting for a peer to connect or to acknowledge earlier chunks."),
    MetricSpec(
        "bytes_received_total",
        "counter",
        "Bytes of KV received into the pool, by transfer backend.",
        ("backend",),
        _each(label_values.BACKENDS),
    ),
    MetricSpec("chunks_received_total", "counter", "KV chunks received into the pool."),
    MetricSpec(
        "chunks_rejected_total",
        "counter",
        "KV chunks that this server refused to accept, by reason.",
        ("reason",),
        _each(label_values.CHUNKS),
    ),
    MetricSpec(
        "nacks_total",
        "counter",
        "KV chunks of this server that peers refused, by reason.",
        ("reason",),
        _each(label_values.CHUNKS),
    ),
    MetricSpec("checksum_failures_total", "counter", "Received KV payloads with a wrong checksum."),
    MetricSpec(
        "malformed_frames_total",
        "counter",
        "Received frames that could not be decoded, by socket.",
        ("socket",),
        _each(label_values.DECODING),
    ),
    MetricSpec(
        "stale_messages_total",
        "counter",
        "Messages dropped because they belong to another generation or state, by message.",
        ("message",),
        _each(label_values.STALE),
    ),
    MetricSpec(
        "refusals_total",
        "counter",
        "Refusals that this server sent to peers, by socket and reason.",
        ("socket", "reason"),
        label_values.REFUSALS,
    ),
    MetricSpec(
        "handshakes_refused_total",
        "counter",
        "Refused CURVE handshakes, by socket and reason.",
        ("socket", "reason"),
        label_values.HANDSHAKES,
    ),
    MetricSpec(
        "refused_here_total",
        "counter",
        "Refusals that this server received from peers, by reason.",
        ("reason",),
        _each(label_values.REFUSED_HERE),
    ),
    MetricSpec(
        "reservations_refused_total",
        "counter",
        "Page reservations refused at the control endpoint, by reason.",
        ("reason",),
        _each(label_values.RESERVATIONS),
    ),
    MetricSpec("control_sessions", "gauge", "Decode peers with an open session at the control endpoint."),
    MetricSpec(
        "sessions_displaced_total",
        "counter",
        "Sessions of decode peers that gave way to a new peer above --max-peers, by cause: idle (without tickets for "
        "longest), share (one of many of a key or host, to a peer of another).",
        ("cause",),
        _each(label_values.DISPLACED),
    ),
    MetricSpec("peers_gone_total", "counter", "Peers given up because they were silent for too long."),
    MetricSpec("open_tickets", "gauge", "Tickets that peers have reserved and that have not ended."),
    MetricSpec(
        "prefill_servers_up", "gauge", "Prefill servers to whose control endpoint this server has an open session."
    ),
    MetricSpec("data_connections", "gauge", "Open data connections to stages of prefill servers."),
    MetricSpec(
        "sessions_being_revoked",
        "gauge",
        "Closed sessions through which a prefill stage may still write into the pool.",
    ),
    MetricSpec("expected_requests", "gauge", "Requests whose KV this server is waiting to receive."),
)

CONNECTIONS: tuple[MetricSpec, ...] = (
    MetricSpec("connections", "gauge", "Open connections, by listening socket.", ("socket",)),
    MetricSpec(
        "connections_closed_total",
        "counter",
        "Connections that this server has closed, by reason: shed (there were too many, and it was the oldest that was "
        "idle or without a session), refused, ended, no_session, unread, slow.",
        ("socket", "reason"),
        label_values.CLOSED,
    ),
    MetricSpec(
        "accept_failures_total",
        "counter",
        "Failed attempts to accept a connection, for want of descriptors or memory.",
        ("socket",),
        _each(("http", "stages")),
    ),
    MetricSpec("http_body_bytes", "gauge", "Bytes of request bodies of which more is to come."),
    MetricSpec(
        "http_bodies_refused_total",
        "counter",
        "Request bodies refused with 503, since those that were being received took all memory that they may.",
    ),
)

KV_EVENTS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "kv_events_published_total",
        "counter",
        "Published KV cache events, by kind.",
        ("event",),
        _each(("stored", "removed", "cleared")),
    ),
    MetricSpec(
        "kv_event_blocks_total",
        "counter",
        "Pages in published KV cache events, by kind.",
        ("event",),
        _each(("stored", "removed", "cleared")),
    ),
    MetricSpec("kv_event_batches_total", "counter", "Published batches of KV cache events."),
    MetricSpec("kv_event_batches_replayed_total", "counter", "Batches of KV cache events sent again to subscribers."),
    MetricSpec(
        "kv_event_replays_total",
        "counter",
        "Replay requests of subscribers, by outcome.",
        ("outcome",),
        _each(("accepted", "refused")),
    ),
)

STAGES: tuple[MetricSpec, ...] = (
    MetricSpec("orders_total", "counter", "Orders sent to every stage since the stages were last started."),
    MetricSpec(
        "stage_orders_total",
        "counter",
        "Orders received by a stage, as of its last heartbeat.",
        ("stage",),
    ),
    MetricSpec(
        "stage_silences_total",
        "counter",
        "Silences of a live stage for which requests had to wait, by cause (stopped, computing, overloaded, disk).",
        ("stage", "cause"),
    ),
    MetricSpec(
        "scheduler_paused_seconds_total",
        "counter",
        "Time in which the scheduler process was due and did not run: stopped, frozen, without a core or swapped out.",
    ),
    MetricSpec("stage_busy_seconds_total", "counter", "Time that a stage spent computing.", ("stage",)),
    MetricSpec(
        "stage_waiting_seconds_total",
        "counter",
        "Time that a stage waited for hidden states or tokens of another stage.",
        ("stage",),
    ),
    MetricSpec("stage_idle_seconds_total", "counter", "Time that a stage had no plan to execute.", ("stage",)),
    MetricSpec(
        "stage_expert_rows_total",
        "counter",
        "Rows that the experts of a stage have computed: one for each token and expert chosen for it.",
        ("stage",),
    ),
    MetricSpec(
        "expert_imbalance",
        "gauge",
        "Rows of a layer's busiest expert over the mean of its experts, averaged over the layers of a stage.",
        ("stage",),
    ),
    MetricSpec(
        "stage_tier_bytes_total",
        "counter",
        "Bytes of KV pages that a stage has copied to (store) or from (load) its host or disk tier.",
        ("stage", "tier", "direction"),
    ),
    MetricSpec(
        "stage_tier_seconds_total",
        "counter",
        "Time that a stage's copy thread spent on these copies, checksums included.",
        ("stage", "tier", "direction"),
    ),
    MetricSpec(
        "stage_tier_failures_total",
        "counter",
        "KV pages that could not be copied: missing (the slot held nothing), checksum (changed in memory or on disk), "
        "full (no space left), io.",
        ("stage", "tier", "direction", "reason"),
    ),
    MetricSpec(
        "stage_disk_ignored_total",
        "counter",
        "KV pages and files that were on disk at the start and are not used: damaged, version, foreign (of another "
        "model, geometry or stage), short (written in part), unreadable, replaced (the slot was stored to later), slot "
        "(the tier has fewer slots now).",
        ("stage", "reason"),
    ),
    MetricSpec("hidden_bytes_total", "counter", "Bytes of hidden states sent to the next stage.", ("stage",)),
)

PREFIX_SOURCES = ("sibling", "open", "resume")
FRONT: tuple[MetricSpec, ...] = (
    MetricSpec("build_info", "gauge", "Always 1; the labels describe this server.", ("version", "role", "model")),
    MetricSpec(
        "kv_files",
        "gauge",
        "KV files of --kv-library at the last look: used, or refused for their format, model, geometry, computation "
        "(another CPU or version), room (too many pages), or unreadable.",
        ("state",),
    ),
    MetricSpec("ready", "gauge", "1 if the server would accept a request, else 0."),
    MetricSpec(
        "requests_total",
        "counter",
        "Requests that ended, as their clients were answered, by outcome (finished, failed, refused, cancelled), "
        "reason and route. Each prompt and choice is one; a request that is refused before it has a prompt is one.",
        ("outcome", "reason", "route"),
        tuple((*end, route) for route in PROMPT_ROUTES for end in ENDS),
    ),
    MetricSpec(
        "e2e_request_latency_seconds",
        "histogram",
        "Time from the arrival of a request to its end, of those that ended well.",
        bounds=E2E_SECONDS,
    ),
    MetricSpec(
        "inter_token_latency_seconds",
        "histogram",
        "Time from one token of a request to the next, as its client sees them.",
        bounds=TOKEN_SECONDS,
    ),
    MetricSpec(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean time of a request's tokens after the first one.",
        bounds=TOKEN_SECONDS,
    ),
    MetricSpec("request_prompt_tokens", "histogram", "Prompt tokens of a request that ended well.", bounds=TOKENS),
    MetricSpec(
        "request_generation_tokens",
        "histogram",
        "Tokens that the client of a request that ended well was sent.",
        bounds=TOKENS,
    ),
    MetricSpec(
        "http_requests_total",
        "counter",
        "HTTP requests, by route and status; 499 if the client disconnected first.",
        ("route", "status"),
        (*((route, str(status)) for route in PROMPT_ROUTES for status in STATUSES), (UNKNOWN_ROUTE, "404")),
    ),
    MetricSpec(
        "http_request_duration_seconds",
        "histogram",
        "Time from the arrival of an HTTP request to the end of its response.",
        ("route",),
        _each((*PROMPT_ROUTES, UNKNOWN_ROUTE)),
    ),
    MetricSpec("time_to_first_token_seconds", "histogram", "Time from the arrival of a request to its first token."),
    MetricSpec(
        "prefill_retries_total",
        "counter",
        "Prompts that this decode server sent to another prefill server before their first token, by what was wrong "
        "with the one before: unreachable, lost (its connection, session or stage ended), overloaded, unavailable (it "
        "drains or is not ready), silent, damaged (checksum, metadata), nonfinite, failed (anything else).",
        ("reason",),
        zeros=tuple((reason,) for reason in MOVE_REASONS),
    ),
    MetricSpec(
        "hedges_total",
        "counter",
        "Prompts whose first token was later than forecast (--hedge): a second prefill server was started and had it "
        "first (won), the first server had it (lost), the second one failed before; or none was started, as too many "
        "were late (refused).",
        ("result",),
        zeros=(("won",), ("lost",), ("failed",), ("refused",)),
    ),
    MetricSpec(
        "prefix_fetches_total",
        "counter",
        "Prefixes fetched into the prefix cache from a sibling, for a prompt or a prefetch, of a prompt that is still "
        "open from the prefill server that computes it, or of a resumed prompt from its decode server: fetched, "
        "failed, or late (computing it would not have taken longer).",
        ("source", "result"),
        zeros=tuple((source, result) for source in PREFIX_SOURCES for result in ("fetched", "failed", "late")),
    ),
    MetricSpec(
        "prefix_fetched_tokens_total",
        "counter",
        "Tokens whose KV came by these fetches.",
        ("source",),
        zeros=tuple((source,) for source in PREFIX_SOURCES),
    ),
    MetricSpec(
        "prefix_fetch_seconds_total",
        "counter",
        "Seconds that these fetches took.",
        ("source",),
        zeros=tuple((source,) for source in PREFIX_SOURCES),
    ),
    MetricSpec(
        "kv_returns_total",
        "counter",
        "Turns whose KV a decode server has offered to the prefill server of the prompt (--kv-return), or that were "
        "offered to this prefill server (--accept-return): taken, or why not. At the decode server also refused (the "
        "prefill server takes none) and failed (it was taken, and has not arrived).",
        ("result",),
        zeros=tuple((result,) for result in (*RETURN_REASONS, "refused", "failed")),
    ),
    MetricSpec("kv_returned_tokens_total", "counter", "Tokens whose KV has gone to prefill servers so, or has come."),
    MetricSpec("kv_returned_bytes_total", "counter", "Bytes of that KV."),
    MetricSpec("kv_return_seconds_total", "counter", "Seconds that moving that KV took."),
    MetricSpec(
        "audits_total",
        "counter",
        "Prompts of which a page was to be computed again by another prefill server and compared (--audit-rate): "
        "equal, different (one of the two servers is wrong; the log names both), or why it was skipped.",
        ("result",),
        zeros=tuple((result,) for result in AUDIT_RESULTS),
    ),
    MetricSpec(
        "prefill_retried_requests_total",
        "counter",
        "Requests whose prompt was sent to more than one prefill server, by how they ended: finished, failed, "
        "cancelled.",
        ("outcome",),
        zeros=(("finished",), ("failed",), ("cancelled",)),
    ),
    MetricSpec(
        "trace_spans_exported_total", "counter", "Spans that the collector of --otlp-traces-endpoint has taken."
    ),
    MetricSpec(
        "trace_spans_lost_total",
        "counter",
        "Spans that were lost, by reason: queue_full (the collector was too slow), not_taken (it was not reached, or "
        "refused them).",
        ("reason",),
        zeros=(("queue_full",), ("not_taken",)),
    ),
    MetricSpec("open_requests", "gauge", "Requests that were submitted to the scheduler and have not ended."),
    MetricSpec("open_prompts", "gauge", "Prompts that are open, to be appended to."),
    MetricSpec("open_prompt_tokens", "gauge", "Tokens of those prompts."),
    MetricSpec("open_pieces_total", "counter", "Pieces of open prompts that were begun to be computed.", (), ((),)),
    MetricSpec(
        "open_prompts_total",
        "counter",
        "Open prompts that have ended, by how: committed, deleted, expired.",
        ("end",),
        _each(label_values.OPEN_ENDS),
    ),
    *ENGINE_GAUGES,
)

PROCESSES: tuple[MetricSpec, ...] = (
    MetricSpec(
        "process_resident_memory_bytes",
        "gauge",
        "Resident memory of each process: front_end, scheduler, rank_0 and so on. Pages that they share count in each.",
        ("process",),
    ),
    MetricSpec("process_cpu_seconds_total", "counter", "CPU time of each process, user and system.", ("process",)),
    MetricSpec(
        "process_output_lines_lost_total",
        "counter",
        "Lines that a process left out of its log or standard output: nobody read it, or a disk was full.",
        ("process",),
    ),
)

RECORDING: tuple[MetricSpec, ...] = (
    MetricSpec("recording_bytes_total", "counter", "Bytes written of recordings (--record)."),
    MetricSpec("recording_segments_total", "counter", "Segments of the recording that were written."),
    MetricSpec("recording_failures_total", "counter", "Segments and files of the recording that could not be written."),
    MetricSpec(
        "recording_files_total",
        "counter",
        "Files that were written of the recording, by reason: request (POST /debug/record), signal (SIGUSR2), "
        "alert (POST /debug/record by Alertmanager), "
        "integrity (a check of the scheduler's state has failed), stage_failed (a stage has failed or fell silent).",
        ("reason",),
        _each(("request", "signal", "alert", "integrity", "stage_failed")),
    ),
    MetricSpec(
        "recording_fork_seconds_total", "counter", "Seconds in which the scheduler was held up to fork its recording."
    ),
)

CATALOG: tuple[MetricSpec, ...] = (
    *SCHEDULER,
    *STAGES,
    *TRANSFER,
    *CONNECTIONS,
    *KV_EVENTS,
    *FRONT,
    *PROCESSES,
    *RECORDING,
)
