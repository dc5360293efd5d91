"""Label values that are known before anything was counted: their series are exported with 0 from the start.

Prometheus' rate() and increase() do not see the first event of a series that appears with it.
"""

from headrace.core.messages.membership import UNREACHABLE_HOST, WRONG_KEY, WRONG_RANK, WRONG_VERSION, WRONG_WORLD_SIZE
from headrace.core.types.errors import CHECKSUM, NOT_READY, TICKET_IN_USE, TOO_MANY_TICKETS
from headrace.core.types.kv.backends import CUDA_IPC, FAKE, NIXL, SHM, ZMQ
from headrace.transfer.protocol.messages import (
    BAD_CHUNK,
    BAD_MESSAGE,
    BAD_METADATA,
    BAD_RESERVATION,
    NO_SESSION,
    TOO_MANY_PEERS,
    UNKNOWN_TICKET,
    WRONG_STAGE,
)

PROMPT_ROUTES = (
    "/v1/prefill",
    "/v1/prefill/{id}/commit",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/generate",
    "/inference/v1/generate",
    "/v1/score",
    "/generative_scoring",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)
"""Those whose requests have prompts, and are counted in requests_total."""

UNKNOWN_ROUTE = "other"
"""The label of all paths that are no route, which clients make up."""

STATUSES = (200, 400, 401, 404, 408, 409, 412, 413, 429, 499, 500, 502, 503, 504)
"""Statuses that routes answer with."""

BACKENDS = (CUDA_IPC, SHM, NIXL, ZMQ, FAKE)
CHUNKS = (BAD_CHUNK, BAD_METADATA, CHECKSUM, UNKNOWN_TICKET)
DECODING = ("control", "control_client", "data", "receiver", "stages", "kv_events_replay")
STALE = ("ack", "before_welcome", "cancel", "cut_off", "repeated_chunk", "reserve", "too_many_renewals")
RESERVATIONS = (BAD_RESERVATION, TICKET_IN_USE, TOO_MANY_TICKETS)
DISPLACED = ("idle", "share")

MISMATCHES = tuple(
    f"{field}_mismatch"
    for field in (
        "protocol",
        "fingerprint",
        "metadata_version",
        "metadata_bytes",
        "checksum",
        "backend",
        "heartbeat_s",
        "components",
        "dtype",
        "head_dim",
        "head_start",
        "kv_heads",
        "layer_start",
        "layers",
        "page_size",
        "planes",
        "split",
    )
)
"""Codes of hellos that do not fit (transfer/protocol/matching.py)."""

REFUSED_HERE = (BAD_MESSAGE, NOT_READY, TOO_MANY_PEERS, *MISMATCHES)
REFUSALS = (
    *(("control", code) for code in REFUSED_HERE),
    *(("data", code) for code in (BAD_MESSAGE, NO_SESSION, WRONG_STAGE)),
    *(("stages", code) for code in (UNREACHABLE_HOST, WRONG_KEY, WRONG_RANK, WRONG_VERSION, WRONG_WORLD_SIZE)),
    ("stages", "too_many_joins"),
)
HANDSHAKES = tuple(
    (socket, reason) for socket in ("control", "data") for reason in ("no_curve", "not_allowed", "wrong_server_key")
)
CLOSED = (
    *(("http", reason) for reason in ("shed", "refused", "unread", "slow")),
    *((socket, reason) for socket in ("control", "data") for reason in ("shed", "refused", "ended", "no_session")),
    *((socket, "unread") for socket in ("control", "data", "receiver")),
    *((socket, "shed") for socket in ("kv_events", "kv_events_replay", "stages")),
)

OPEN_ENDS = ("committed", "deleted", "expired")
"""How open prompts end."""
