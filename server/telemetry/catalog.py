"""Every metric a server shows: the scheduler's, the transfer's, and the front end's own."""

from headrace.core.stats import MetricSpec
from headrace.scheduler.state.metrics import CATALOG as SCHEDULER

TRANSFER: tuple[MetricSpec, ...] = (
    MetricSpec("bytes_sent_total", "counter", "Payload bytes of KV sent to peers, by the way they went.", ("backend",)),
    MetricSpec("chunks_sent_total", "counter", "Chunks of KV sent to peers."),
    MetricSpec("unacked_bytes", "gauge", "Payload bytes sent and not yet acknowledged."),
    MetricSpec("queued_chunks", "gauge", "Chunks that wait for a peer to connect or to acknowledge others."),
    MetricSpec(
        "bytes_received_total",
        "counter",
        "Payload bytes of KV that came into the pool, by the way they came.",
        ("backend",),
    ),
    MetricSpec("chunks_received_total", "counter", "Chunks of KV written into the pool."),
    MetricSpec("chunks_rejected_total", "counter", "Chunks refused here, by reason.", ("reason",)),
    MetricSpec("nacks_total", "counter", "Chunks that peers have refused, by reason.", ("reason",)),
    MetricSpec("checksum_failures_total", "counter", "Payloads whose checksum was wrong."),
    MetricSpec("malformed_frames_total", "counter", "Frames that are no message of the protocol.", ("socket",)),
    MetricSpec("stale_messages_total", "counter", "Messages of another generation or state, dropped.", ("message",)),
    MetricSpec("refusals_total", "counter", "Peers refused by this server.", ("socket", "reason")),
    MetricSpec(
        "handshakes_refused_total", "counter", "CURVE handshakes refused, by socket and reason.", ("socket", "reason")
    ),
    MetricSpec("refused_here_total", "counter", "Refusals this server got from others.", ("reason",)),
    MetricSpec("reservations_refused_total", "counter", "Reservations refused at the control endpoint.", ("reason",)),
    MetricSpec("control_sessions", "gauge", "Decode peers with a session at the control endpoint."),
    MetricSpec("peers_gone_total", "counter", "Peers that fell silent."),
    MetricSpec("open_tickets", "gauge", "Tickets that peers have reserved and that have not ended."),
    MetricSpec("prefill_servers_up", "gauge", "Prefill servers whose control endpoint has welcomed this server."),
    MetricSpec("data_connections", "gauge", "Data connections to stages of prefill servers."),
    MetricSpec(
        "sessions_being_revoked", "gauge", "Ended sessions through which a prefill stage may still write into the pool."
    ),
    MetricSpec("expected_requests", "gauge", "Requests whose KV is expected by wire."),
)

KV_EVENTS: tuple[MetricSpec, ...] = (
    MetricSpec("kv_events_published_total", "counter", "Events of the prefix cache, by kind.", ("event",)),
    MetricSpec("kv_event_blocks_total", "counter", "Pages named in events of the prefix cache.", ("event",)),
    MetricSpec("kv_event_batches_total", "counter", "Batches of events published."),
    MetricSpec("kv_event_batches_replayed_total", "counter", "Batches sent again to subscribers that asked."),
    MetricSpec("kv_event_replays_total", "counter", "Requests for replay, by outcome.", ("outcome",)),
)

STAGES: tuple[MetricSpec, ...] = (
    MetricSpec("orders_total", "counter", "Orders sent to every stage since their group began."),
    MetricSpec(
        "stage_orders_total",
        "counter",
        "Orders that a stage has had, the same as were sent, as of its last heartbeat.",
        ("stage",),
    ),
    MetricSpec("stage_busy_seconds_total", "counter", "Time a stage spent computing.", ("stage",)),
    MetricSpec(
        "stage_waiting_seconds_total",
        "counter",
        "Time a stage waited for another one's hidden states or tokens.",
        ("stage",),
    ),
    MetricSpec("stage_idle_seconds_total", "counter", "Time a stage had no plan.", ("stage",)),
    MetricSpec("hidden_bytes_total", "counter", "Bytes of hidden states passed on to the next stage.", ("stage",)),
)

FRONT: tuple[MetricSpec, ...] = (
    MetricSpec("build_info", "gauge", "Always 1; what this server is.", ("version", "role", "model")),
    MetricSpec("ready", "gauge", "1 while the server would serve a request."),
    MetricSpec("http_requests_total", "counter", "HTTP requests answered.", ("route", "status")),
    MetricSpec(
        "http_request_duration_seconds", "histogram", "From a request's arrival to the end of its answer.", ("route",)
    ),
    MetricSpec("time_to_first_token_seconds", "histogram", "From a request's arrival to its first token."),
    MetricSpec("open_requests", "gauge", "Requests between submission and their end."),
)

CATALOG: tuple[MetricSpec, ...] = (*SCHEDULER, *STAGES, *TRANSFER, *KV_EVENTS, *FRONT)
