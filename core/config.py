"""Configuration slices: frozen, complete, parsed once in server/config/load.py. Each part gets its own slice only."""

from typing import Literal

import msgspec

from headrace.core.types.backends import SHM, ZMQ

Role = Literal["prefill", "decode", "colocated"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Compile = Literal["auto", "on", "off"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """model: "smollm2", a folder, a .gguf file or a hub id. dtype and device are resolved (never "auto") when a
    stage sees them. max_model_len: prompt and generated tokens together; 0 takes the model's own limit."""

    model: str = "smollm2"
    dtype: Dtype = "auto"
    device: str = "auto"
    max_model_len: int = 0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """kv_pages 0 sizes the pool from memory. threads: compute threads of one stage; 0 takes all cores over stages.
    pp_layers: layers of each stage; () splits them so that stages take equal time (resolved before a stage sees it).
    compile: norms, rotary embedding and activation by torch.compile; "auto" on CUDA, where Triton is installed."""

    page_size: int = 16
    kv_pages: int = 0
    threads: int = 0
    pp_layers: tuple[int, ...] = ()
    compile: Compile = "auto"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and deadlines of the scheduler. Deadlines measure the silence of somebody, in seconds.

    chunk_tokens: token budget of one plan. chunking "dynamic": chunks shrink as the prefix grows, so that all plans
    take about the same time. max_running: rows in one plan. metadata_rows: requests that may hold a metadata row at
    once. kv_events: report what the prefix cache gains and loses. pipeline_depth: plans in flight beyond one per
    stage. max_queued_tokens: prompt tokens not yet planned; above it requests get 429. bootstrap_timeout_s: a
    ticket whose other half never comes. transfer_timeout_s: no acknowledgement (or no chunk) for this long.
    stage_timeout_s: one plan. start_timeout_s: stages that load. hold_lease_s: how long a computed prompt is held for
    a peer that neither comes nor renews; hold_limit_s: how long in all; hold_percent: of the pool's pages, what prompts
    held for later may take. optimistic_start: prompts may be computed before their peer has reserved, within that
    share.
    """

    page_size: int = 16
    kv_pages: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    stages: int = 1
    pipeline_depth: int = 1
    chunk_tokens: int = 512
    chunking: Literal["fixed", "dynamic"] = "fixed"
    max_running: int = 64
    metadata_rows: int = 256
    max_queued_tokens: int = 262144
    max_queued_requests: int = 4096
    prefix_cache: bool = True
    kv_events: bool = False
    policy: str = "fcfs"
    bootstrap_timeout_s: float = 30.0
    transfer_timeout_s: float = 10.0
    stage_timeout_s: float = 120.0
    start_timeout_s: float = 600.0
    hold_lease_s: float = 30.0
    hold_limit_s: float = 600.0
    hold_percent: int = 50
    optimistic_start: bool = False


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """control_port and data_port 0 take free ports. window_bytes: unacknowledged bytes a receiver allows per sender.
    peer_timeout_s: silence after which a peer is gone; pings go out at a third of it. backends: ways to move KV that
    may be used, best first; the prefill server's order counts. checksum: of payload that goes over a network;
    checksum_shm: also of what is copied within one machine. curve_key: file with this server's CURVE keys, "" for
    connections in the clear; curve_allowed: folder with the public keys of the peers that may connect. Both are read
    where the sockets are."""

    host: str = "127.0.0.1"
    control_port: int = 0
    data_port: int = 0
    window_bytes: int = 64 << 20
    peer_timeout_s: float = 3.0
    checksum: bool = True
    checksum_shm: bool = False
    max_peers: int = 64
    max_tickets_per_peer: int = 1024
    max_frame_bytes: int = 256 << 20
    backends: tuple[str, ...] = (SHM, ZMQ)
    curve_key: str = ""
    curve_allowed: str = ""


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who starts the stages. "local": this server, on this machine. "external": somebody else, anywhere; they join at
    host:port (port 0 takes a free one) and show the key."""

    start: Literal["local", "external"] = "local"
    host: str = "127.0.0.1"
    port: int = 0
    key: str = ""


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where routers follow the prefix cache. port 0: no events; replay_port 0: no replay. buffer: batches kept for
    replay, and how many a subscriber may be behind before it misses some."""

    host: str = "127.0.0.1"
    port: int = 0
    replay_port: int = 0
    topic: str = ""
    buffer: int = 10_000


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The front end. fallback "local": a decode server computes prompts itself when no prefill server can.
    prefill_api_key: the key a decode server shows to its prefill servers; "" shows none. allow_prefill: prefill servers
    that clients and routers may name to a decode server, beside its own (core/types/allow_list.py).
    curve_server_keys: key files
    of prefill servers, each FILE for all or HOST=FILE for one (server/config/curve_keys.py). bootstrap_port: on a
    prefill server
    another port that tells where the control endpoint is, 0 for none; on a decode server the one to ask where a router
    names none, 0 for the usual one (server/upstream/handoff_params.py)."""

    role: Role = "colocated"
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    prefill: tuple[str, ...] = ()
    allow_prefill: tuple[str, ...] = ()
    curve_server_keys: tuple[str, ...] = ()
    prefill_api_key: str = ""
    bootstrap_port: int = 0
    fallback: Literal["none", "local"] = "none"
    max_body_bytes: int = 16 << 20
    drain_timeout_s: float = 30.0
    served_model_name: str = ""
    cache_dir: str = ""  # of what takes long to work out and is kept from start to start; "" keeps nothing
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All slices of one server."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transfer: TransferConfig = TransferConfig()
    group: GroupConfig = GroupConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
    server: ServerConfig = ServerConfig()


class StageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage process is told at its start. endpoint: the scheduler's order socket.

    stages: how many there are. epoch: counts the starts of the group of stages, so that what a dead group has left
    behind is not taken for the new one's. session: secret of the group's start where stages are not the server's own
    processes, "" where they are. rendezvous: HOST:PORT where the stages of one start meet. rendezvous_hosted: somebody
    else listens there (torchrun's agent), else stage 0 does. stage_timeout_s: longest wait for another stage.
    measure_tokens: chunk length around which to measure the stage's speed before it is ready; 0 does not.
    role: of the server.
    """

    stage: int
    endpoint: str
    model: ModelConfig
    engine: EngineConfig
    transfer: TransferConfig
    log_level: str = "info"
    stages: int = 1
    epoch: int = 0
    session: str = ""
    rendezvous: str = ""
    rendezvous_hosted: bool = False
    stage_timeout_s: float = 120.0
    measure_tokens: int = 0
    role: Role = "colocated"
