"""The table of user settings. A row makes a TOML key and a flag; the field it fills has the type and the default."""

from typing import Literal

import msgspec

from core.backends import BACKENDS
from core.config import Config
from scheduler.policy import POLICIES

SliceName = Literal["model", "engine", "scheduler", "transfer", "group", "kv_events", "server"]
Kind = Literal["text", "integer", "size", "number", "switch", "choice", "list", "integers", "choices"]


class Setting(msgspec.Struct, frozen=True):
    """One key. slice and field say where it lands in Config; low and high are inclusive bounds of numbers."""

    key: str
    slice: SliceName
    field: str
    kind: Kind
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    def value(self, config: Config) -> object:
        """What a configuration holds under this key."""
        slices = {
            "model": config.model,
            "engine": config.engine,
            "scheduler": config.scheduler,
            "transfer": config.transfer,
            "group": config.group,
            "kv_events": config.kv_events,
            "server": config.server,
        }
        return msgspec.structs.asdict(slices[self.slice])[self.field]


PORT = 65535

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "role",
        "server",
        "role",
        "choice",
        "prefill hands the KV cache to decode servers; decode fetches it; colocated does both itself",
        choices=("prefill", "decode", "colocated"),
    ),
    Setting("model", "model", "model", "text", "smollm2, a Hugging Face folder, a .gguf file or a hub id"),
    Setting(
        "served-model-name",
        "server",
        "served_model_name",
        "text",
        "name of the model in the API (default: the value of --model)",
    ),
    Setting(
        "dtype",
        "model",
        "dtype",
        "choice",
        "of weights and KV cache",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    Setting("device", "model", "device", "text", "auto, cpu or cuda[:index]"),
    Setting(
        "max-model-len",
        "model",
        "max_model_len",
        "integer",
        "prompt and generated tokens of one request together; 0: the model's own limit",
        low=0,
    ),
    Setting("host", "server", "host", "text", "address the HTTP server binds to"),
    Setting("port", "server", "port", "integer", "HTTP port; 0 takes a free one", low=0, high=PORT),
    Setting(
        "api-key",
        "server",
        "api_keys",
        "list",
        "key clients must show as 'Authorization: Bearer KEY'; also HEADRACE_API_KEY",
        secret=True,
    ),
    Setting("insecure", "server", "insecure", "switch", "allow a bind beyond loopback without API keys"),
    Setting("page-size", "engine", "page_size", "integer", "tokens per KV page, a power of two", low=1, high=4096),
    Setting("kv-pages", "engine", "kv_pages", "integer", "pages in the KV pool; 0: as many as memory allows", low=0),
    Setting("threads", "engine", "threads", "integer", "CPU threads of one stage; 0: all cores over stages", low=0),
    Setting(
        "pp", "scheduler", "stages", "integer", "pipeline stages, a process with a share of the layers each", low=1
    ),
    Setting(
        "pp-layers",
        "engine",
        "pp_layers",
        "integers",
        "layers of each stage, such as 8,8,7,7 (default: so that stages take equal time)",
    ),
    Setting(
        "stages",
        "group",
        "start",
        "choice",
        "local: this server starts its stages; external: they are started elsewhere (headrace stage) and join it",
        choices=("local", "external"),
    ),
    Setting("stage-host", "group", "host", "text", "address where external stages join"),
    Setting(
        "stage-port", "group", "port", "integer", "port where external stages join; 0: a free one", low=0, high=PORT
    ),
    Setting(
        "stage-key",
        "group",
        "key",
        "text",
        "key that external stages must show; also HEADRACE_STAGE_KEY",
        secret=True,
    ),
    Setting("chunk-tokens", "scheduler", "chunk_tokens", "integer", "token budget of one forward pass", low=1),
    Setting(
        "chunking",
        "scheduler",
        "chunking",
        "choice",
        "fixed: chunks of one length; dynamic: shorter as the prompt goes on, so that all take the same time",
        choices=("fixed", "dynamic"),
    ),
    Setting("max-running", "scheduler", "max_running", "integer", "requests in one forward pass", low=1),
    Setting(
        "pipeline-depth",
        "scheduler",
        "pipeline_depth",
        "integer",
        "forward passes in flight beyond one per stage; 0: none overlaps",
        low=0,
        high=16,
    ),
    Setting("policy", "scheduler", "policy", "choice", "order in which prompts are computed", choices=tuple(POLICIES)),
    Setting("prefix-cache", "scheduler", "prefix_cache", "switch", "reuse the KV pages of equal prompt beginnings"),
    Setting(
        "max-queued-tokens",
        "scheduler",
        "max_queued_tokens",
        "integer",
        "prompt tokens that may wait; above it requests get 429",
        low=1,
    ),
    Setting(
        "max-queued-requests",
        "scheduler",
        "max_queued_requests",
        "integer",
        "requests that may be open; above it requests get 429",
        low=1,
    ),
    Setting(
        "bootstrap-timeout",
        "scheduler",
        "bootstrap_timeout_s",
        "number",
        "seconds a ticket waits for its other half",
        low=0.001,
    ),
    Setting(
        "transfer-timeout",
        "scheduler",
        "transfer_timeout_s",
        "number",
        "seconds without an acknowledgement or a chunk after which a handoff fails",
        low=0.001,
    ),
    Setting(
        "hold-lease",
        "scheduler",
        "hold_lease_s",
        "number",
        "seconds a held prompt's KV waits for a peer that neither fetches nor renews it",
        low=0.001,
    ),
    Setting(
        "hold-limit",
        "scheduler",
        "hold_limit_s",
        "number",
        "seconds a held prompt's KV waits in all, however often it is renewed",
        low=0.001,
    ),
    Setting(
        "hold-percent",
        "scheduler",
        "hold_percent",
        "integer",
        "of the KV pool that prompts held for a later fetch may take; beyond it they get 429",
        low=0,
        high=100,
    ),
    Setting(
        "optimistic-start",
        "scheduler",
        "optimistic_start",
        "switch",
        "compute prompts before their peer has reserved pages, within the share of --hold-percent",
    ),
    Setting(
        "stage-timeout",
        "scheduler",
        "stage_timeout_s",
        "number",
        "seconds one forward pass may take",
        low=0.001,
    ),
    Setting(
        "start-timeout",
        "scheduler",
        "start_timeout_s",
        "number",
        "seconds the stages may take to load, after which they are started again",
        low=1,
    ),
    Setting(
        "prefill",
        "server",
        "prefill",
        "list",
        "URL of a prefill server (role decode; give it once per server)",
    ),
    Setting(
        "allow-prefill",
        "server",
        "allow_prefill",
        "list",
        "prefill servers that requests may name beside those of --prefill (role decode): HOST, HOST:PORT or a network",
    ),
    Setting(
        "prefill-api-key",
        "server",
        "prefill_api_key",
        "text",
        "key to show to the prefill servers; also HEADRACE_PREFILL_API_KEY",
        secret=True,
    ),
    Setting(
        "bootstrap-port",
        "server",
        "bootstrap_port",
        "integer",
        "role prefill: a second port that tells where the desk is, for routers (0: only --port); role decode: the port "
        "to ask where a router names none (0: 8998)",
        low=0,
        high=PORT,
    ),
    Setting(
        "fallback",
        "server",
        "fallback",
        "choice",
        "when no prefill server can (role decode): none answers 503, local computes the prompt here",
        choices=("none", "local"),
    ),
    Setting("transfer-host", "transfer", "host", "text", "address the desk and the data sockets bind to"),
    Setting("desk-port", "transfer", "desk_port", "integer", "port of the desk; 0: a free one", low=0, high=PORT),
    Setting(
        "data-port",
        "transfer",
        "data_port",
        "integer",
        "data port of stage 0, the others follow; 0: free ones",
        low=0,
        high=PORT,
    ),
    Setting(
        "window-bytes",
        "transfer",
        "window_bytes",
        "size",
        'unacknowledged bytes allowed per sender, such as "64MiB"',
        low=65536,
    ),
    Setting(
        "peer-timeout",
        "transfer",
        "peer_timeout_s",
        "number",
        "seconds of silence after which a peer is gone",
        low=0.05,
    ),
    Setting(
        "transfer-backends",
        "transfer",
        "backends",
        "choices",
        "ways to move KV, best first: shm (between servers on one machine), nixl (RDMA or TCP, if headrace[nixl] is "
        "installed), zmq, fake (nothing moves, for benchmarks)",
        choices=BACKENDS,
    ),
    Setting("checksum", "transfer", "checksum", "switch", "checksum KV that goes over a network (zmq, nixl)"),
    Setting(
        "checksum-shm",
        "transfer",
        "checksum_shm",
        "switch",
        "checksum also KV that is copied within one machine (shm); takes a quarter or more of its speed",
    ),
    Setting("max-peers", "transfer", "max_peers", "integer", "decode servers that may be connected", low=1),
    Setting(
        "max-tickets-per-peer",
        "transfer",
        "max_tickets_per_peer",
        "integer",
        "open tickets of one decode server",
        low=1,
    ),
    Setting(
        "curve-key",
        "transfer",
        "curve_key",
        "text",
        "file NAME.key_secret of headrace keys: desk and data connections are encrypted, with peers that are known",
    ),
    Setting(
        "curve-allowed",
        "transfer",
        "curve_allowed",
        "text",
        "folder with the public keys (NAME.key) of the decode servers that may connect (role prefill)",
    ),
    Setting(
        "curve-server-key",
        "server",
        "curve_server_keys",
        "list",
        "public key file of the prefill servers, or HOST=FILE, HOST:PORT=FILE of some of them (role decode)",
    ),
    Setting("kv-events-host", "kv_events", "host", "text", "address the sockets for KV events bind to"),
    Setting(
        "kv-events-port",
        "kv_events",
        "port",
        "integer",
        "port on which KV events are published to routers, in vLLM's format; 0: none are",
        low=0,
        high=PORT,
    ),
    Setting(
        "kv-events-replay-port",
        "kv_events",
        "replay_port",
        "integer",
        "port where routers ask for KV events that they have missed; 0: nowhere",
        low=0,
        high=PORT,
    ),
    Setting("kv-events-topic", "kv_events", "topic", "text", "topic of the KV events (default: the empty one)"),
    Setting(
        "kv-events-buffer",
        "kv_events",
        "buffer",
        "integer",
        "batches of KV events kept for replay, and unread ones kept for a slow subscriber",
        low=1,
        high=1_000_000,
    ),
    Setting(
        "max-body-bytes",
        "server",
        "max_body_bytes",
        "size",
        'largest HTTP body, such as "16MiB"; above it requests get 413',
        low=1024,
    ),
    Setting(
        "drain-timeout",
        "server",
        "drain_timeout_s",
        "number",
        "seconds that work in flight may take to finish after SIGTERM",
        low=0,
    ),
    Setting(
        "cache-dir",
        "server",
        "cache_dir",
        "text",
        "folder for what is kept from start to start (default: headrace in $XDG_CACHE_HOME or ~/.cache)",
    ),
    Setting(
        "log-level",
        "server",
        "log_level",
        "choice",
        "least severe messages that are logged",
        choices=("debug", "info", "warning", "error"),
    ),
)

BY_KEY: dict[str, Setting] = {setting.key: setting for setting in SETTINGS}
