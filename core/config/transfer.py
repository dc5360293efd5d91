"""Configuration of the KV handoff between servers, and of the KV events that routers subscribe to."""

from typing import Annotated

import msgspec

from headrace.core.config.flag import HANDOFF, SECURITY, TELEMETRY, Flag, port_flag
from headrace.core.types.kv.backends import CUDA_IPC, SHM, ZMQ, Backend


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Control endpoint, data sockets and transfer backends."""

    host: Annotated[
        str, Flag("transfer-host", HANDOFF, "address the control endpoint and the data sockets bind to")
    ] = "127.0.0.1"
    control_port: Annotated[int, port_flag("control-port", HANDOFF, "port of the control endpoint; 0: a free one")] = 0
    data_port: Annotated[
        int, port_flag("data-port", HANDOFF, "data port of stage 0, the other stages follow; 0: free ones")
    ] = 0
    window_bytes: Annotated[
        int,
        Flag(
            "window-bytes",
            HANDOFF,
            'unacknowledged bytes that a receiver allows per sender, such as "64MiB"',
            low=65536,
            unit="bytes",
        ),
    ] = 64 << 20
    peer_timeout_s: Annotated[
        float, Flag("peer-timeout", HANDOFF, "seconds of silence after which a peer is considered gone", low=0.05)
    ] = 3.0
    """Heartbeats go out at a third of it."""
    checksum: Annotated[bool, Flag("checksum", HANDOFF, "checksum KV that goes over a network (zmq, nixl)")] = True
    checksum_shm: Annotated[
        bool,
        Flag(
            "checksum-shm",
            HANDOFF,
            "also checksum KV that is copied within one machine (shm), which costs a quarter or more of its speed",
        ),
    ] = False
    max_peers: Annotated[int, Flag("max-peers", HANDOFF, "decode servers that may be connected", low=1)] = 64
    max_tickets_per_peer: Annotated[
        int, Flag("max-tickets-per-peer", HANDOFF, "open tickets of one decode server", low=1)
    ] = 1024
    max_frame_bytes: int = 256 << 20
    """Longest ZMQ frame that is accepted from a peer."""
    backends: Annotated[
        tuple[Backend, ...],
        Flag(
            "transfer-backends",
            HANDOFF,
            "backends that may move KV, best first: cuda_ipc (GPUs of the same machine), shm (same machine), nixl "
            "(RDMA or TCP, needs headrace[nixl]), zmq, fake (moves nothing, for benchmarks)",
        ),
    ] = (CUDA_IPC, SHM, ZMQ)
    """The prefill server's order decides."""
    curve_key: Annotated[
        str,
        Flag(
            "curve-key",
            SECURITY,
            "file NAME.key_secret written by headrace keys; encrypts control and data connections and accepts known "
            "peers only",
        ),
    ] = ""
    """Empty: connections are not encrypted."""
    curve_allowed: Annotated[
        str,
        Flag(
            "curve-allowed",
            SECURITY,
            "folder with the public keys (NAME.key) of the decode servers that may connect (role prefill)",
        ),
    ] = ""


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sockets where routers follow the prefix cache, in vLLM's format."""

    host: Annotated[str, Flag("kv-events-host", TELEMETRY, "address the sockets for KV cache events bind to")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        port_flag(
            "kv-events-port", TELEMETRY, "port where KV cache events are published to routers, in vLLM's format; 0: off"
        ),
    ] = 0
    replay_port: Annotated[
        int,
        port_flag("kv-events-replay-port", TELEMETRY, "port where routers request KV cache events they missed; 0: off"),
    ] = 0
    topic: Annotated[
        str, Flag("kv-events-topic", TELEMETRY, "ZMQ topic of the KV cache events (default: the empty one)")
    ] = ""
    buffer: Annotated[
        int,
        Flag(
            "kv-events-buffer",
            TELEMETRY,
            "batches of KV cache events kept for replay, and unread ones kept for a slow subscriber",
            low=1,
            high=1_000_000,
        ),
    ] = 10_000
