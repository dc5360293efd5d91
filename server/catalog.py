"""Every metric a server shows: the scheduler's, the transfer's, and the front end's own."""

from core.stats import MetricSpec
from scheduler.metrics import CATALOG as SCHEDULER

TRANSFER: tuple[MetricSpec, ...] = (
    MetricSpec("bytes_sent_total", "counter", "Payload bytes of KV that peers have acknowledged."),
    MetricSpec("chunks_sent_total", "counter", "Chunks of KV that peers have acknowledged."),
    MetricSpec("bytes_received_total", "counter", "Payload bytes of KV written into the pool."),
    MetricSpec("chunks_received_total", "counter", "Chunks of KV written into the pool."),
    MetricSpec("checksum_failures_total", "counter", "Payloads whose checksum was wrong."),
    MetricSpec("malformed_frames_total", "counter", "Frames that are no message of the protocol.", ("socket",)),
    MetricSpec("stale_messages_total", "counter", "Messages of another generation or state, dropped.", ("message",)),
    MetricSpec("refusals_total", "counter", "Peers refused by this server.", ("socket", "reason")),
    MetricSpec("refused_here_total", "counter", "Refusals this server got from others.", ("reason",)),
    MetricSpec("reservations_refused_total", "counter", "Reservations refused at the desk.", ("reason",)),
    MetricSpec("peers", "gauge", "Decode peers connected to the desk."),
    MetricSpec("peers_gone_total", "counter", "Peers that fell silent."),
    MetricSpec("attached_peers", "gauge", "Peers attached to the data socket."),
    MetricSpec("open_tickets", "gauge", "Tickets that peers have reserved and that have not ended."),
    MetricSpec("prefill_servers_up", "gauge", "Prefill servers whose desk welcomed this server."),
    MetricSpec("unacked_bytes", "gauge", "Payload bytes sent and not yet acknowledged."),
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

CATALOG: tuple[MetricSpec, ...] = (*SCHEDULER, *TRANSFER, *FRONT)
