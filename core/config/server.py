"""Configuration of the front end: role, HTTP server, keys, and the prefill servers of a decode server."""

from typing import Annotated, Literal

import msgspec

from headrace.core.config.flag import HANDOFF, HTTP, MODEL, SECURITY, SERVER, TELEMETRY, Flag, port_flag

Role = Literal["prefill", "decode", "colocated"]
Fallback = Literal["none", "local"]
Routing = Literal["score", "least-load"]
Remote = Literal["always", "never", "cost"]
GATEWAY_PORT = 8100
ToolFormat = Literal[
    "hermes", "llama3_json", "mistral", "deepseek_v3", "kimi_k2", "qwen3_coder", "glm45", "gemma4", "harmony"
]
ToolParser = Literal["auto", ToolFormat]
ReasoningFormat = Literal["think", "harmony", "gemma4", "kimi", "mistral", "seed_oss"]
ReasoningParser = Literal["auto", "none", ReasoningFormat]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
# Of gateways, too.
MetricsNames = Annotated[
    Literal["headrace", "vllm"],
    Flag(
        "metrics-names",
        TELEMETRY,
        "vllm: /metrics has requests running and waiting, KV usage and pages under vLLM's names, too, for routers "
        "that look for those",
    ),
]
MaxBodyBytes = Annotated[
    int,
    Flag(
        "max-body-bytes", HTTP, 'largest HTTP body, such as "16MiB"; above it requests get 413', low=1024, unit="bytes"
    ),
]
KeepAlive = Annotated[
    float,
    Flag(
        "keep-alive",
        HTTP,
        "seconds for which a connection stays open without a request: longer than those in the pools of clients, "
        "proxies and balancers",
        low=1,
        high=86400,
    ),
]
AllowedHosts = Annotated[
    tuple[str, ...],
    Flag(
        "allowed-host",
        SECURITY,
        "name by which clients and web pages may reach a server on loopback without API keys, beside those of this "
        "machine; where it is given, the names are checked whatever the bind and the keys are",
    ),
]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The front end process."""

    role: Annotated[
        Role,
        Flag(
            "role",
            SERVER,
            "prefill computes prompts and hands their KV cache to decode servers; decode fetches it and generates; "
            "colocated does both itself",
        ),
    ] = "colocated"
    host: Annotated[str, Flag("host", HTTP, "address the HTTP server binds to")] = "127.0.0.1"
    port: Annotated[int, port_flag("port", HTTP, "HTTP port; 0: a free one")] = 8000
    api_keys: Annotated[
        tuple[str, ...],
        Flag(
            "api-key",
            SECURITY,
            "key that clients must send as 'Authorization: Bearer KEY'",
            secret=True,
            variable="HEADRACE_API_KEY",
        ),
    ] = ()
    allowed_hosts: AllowedHosts = ()
    tenant_keys: Annotated[
        tuple[str, ...],
        Flag(
            "tenant-key",
            SECURITY,
            "NAME=KEY: an API key whose requests count as those of the tenant NAME, which share the server fairly",
            secret=True,
            variable="HEADRACE_TENANT_KEY",
        ),
    ] = ()
    """Parsed by core/types/requests/tenants.py, as are the priority ranges."""
    share_prefixes: Annotated[
        bool,
        Flag(
            "share-prefixes",
            SECURITY,
            "share cached prefixes among tenants, which then learn from cached_tokens and times what others have sent",
        ),
    ] = False
    priority_ranges: Annotated[
        tuple[str, ...],
        Flag(
            "priority-range",
            SECURITY,
            "LOW:HIGH: priorities that requests may have, others are cut to it; NAME=LOW:HIGH: those of one tenant",
        ),
    ] = ()
    insecure: Annotated[bool, Flag("insecure", SECURITY, "allow binds beyond loopback without keys of any kind")] = (
        False
    )
    trusted_network: Annotated[
        bool,
        Flag(
            "trusted-network",
            SECURITY,
            "allow control, data and KV event ports beyond loopback without CURVE keys; HTTP still needs an API key",
        ),
    ] = False
    prefill: Annotated[
        tuple[str, ...],
        Flag("prefill", HANDOFF, "URL of a prefill server (role decode; give it once per server)"),
    ] = ()
    allow_prefill: Annotated[
        tuple[str, ...],
        Flag(
            "allow-prefill",
            HANDOFF,
            "prefill servers that requests may name beside those of --prefill (role decode): HOST, HOST:PORT or a "
            "network",
        ),
    ] = ()
    """Parsed by core/types/peers/allow_list.py."""
    curve_server_keys: Annotated[
        tuple[str, ...],
        Flag(
            "curve-server-key",
            SECURITY,
            "public key file of the prefill servers, or HOST=FILE, HOST:PORT=FILE of some of them (role decode)",
        ),
    ] = ()
    prefill_api_key: Annotated[
        str,
        Flag(
            "prefill-api-key",
            SECURITY,
            "API key to send to the servers of --prefill and --sibling, and of --allow-prefill HOST:PORT",
            secret=True,
            variable="HEADRACE_PREFILL_API_KEY",
        ),
    ] = ""
    siblings: Annotated[
        tuple[str, ...],
        Flag(
            "sibling",
            HANDOFF,
            "URL of another prefill server (role prefill; give it once per server): prefixes that it has cached are "
            "fetched from it where that is predicted to be faster than computing them",
        ),
    ] = ()
    kv_return: Annotated[
        bool,
        Flag(
            "kv-return",
            HANDOFF,
            "role decode: offer the KV of each turn to the prefill server that computed its prompt; opens a control "
            "endpoint",
        ),
    ] = False
    audit_rate: Annotated[
        float,
        Flag(
            "audit-rate",
            HANDOFF,
            "role decode: share of the prompts of which another prefill server computes one page again, to be compared "
            "with what was sent; 0: none",
            low=0,
            high=1,
            unit="share",
        ),
    ] = 0.0
    accept_returns: Annotated[
        tuple[str, ...],
        Flag(
            "accept-return",
            HANDOFF,
            "role prefill: decode servers from which KV that they offer is taken: HOST, HOST:PORT or a network",
        ),
    ] = ()
    """Parsed by core/types/peers/allow_list.py."""
    gateway_decode: Annotated[
        tuple[str, ...],
        Flag(
            "gateway-decode",
            HANDOFF,
            "role prefill: start a gateway for this decode engine, too, as --decode of headrace gateway: URL or "
            "URL=HOST:PORT; give it once per engine",
        ),
    ] = ()
    """Parsed by core/types/peers/decode_address.py."""
    gateway_port: Annotated[int, port_flag("gateway-port", HANDOFF, "HTTP port of that gateway; 0: a free one")] = (
        GATEWAY_PORT
    )
    gateway_decode_api_key: Annotated[
        str,
        Flag(
            "gateway-decode-api-key",
            SECURITY,
            "API key that the gateway sends to its decode engines",
            secret=True,
            variable="HEADRACE_DECODE_API_KEY",
        ),
    ] = ""
    bootstrap_port: Annotated[
        int,
        port_flag(
            "bootstrap-port",
            HANDOFF,
            "role prefill: a second port that tells routers where the control endpoint is (0: only --port); role "
            "decode: the port to ask where a router names none (0: 8998)",
        ),
    ] = 0
    fallback: Annotated[
        Fallback,
        Flag(
            "fallback",
            HANDOFF,
            "when no prefill server can compute a prompt (role decode): none answers 503, local computes it here",
        ),
    ] = "none"
    remote: Annotated[
        Remote,
        Flag(
            "remote",
            HANDOFF,
            "which prompts go to a prefill server (role decode): always all; never none; cost those that are predicted "
            "to add less waiting there, short and cached ones are computed here",
        ),
    ] = "always"
    if_available_tokens: Annotated[
        int,
        Flag(
            "if-available-tokens",
            HANDOFF,
            "a request with the header Prefer: if-available is answered with 412 if so many tokens of its prompt, or "
            "more, are not in the prefix cache (role decode); 0: the header is not looked at",
            low=0,
        ),
    ] = 64
    routing: Annotated[
        Routing,
        Flag(
            "routing",
            HANDOFF,
            "how a prefill server is chosen (role decode): score by seconds queued, prompt cached and to be loaded; "
            "least-load by prompt tokens sent and not answered",
        ),
    ] = "score"
    hedge: Annotated[
        float,
        Flag(
            "hedge",
            HANDOFF,
            "role decode: start a second prefill server on a prompt whose first token takes this many times as long as "
            "forecast; 0: never",
            low=0,
            unit="factor",
        ),
    ] = 0.0
    open_prompts: Annotated[
        int,
        Flag("open-prompts", HTTP, "prompts of one tenant that may be open, to be appended to; 0: none", low=0),
    ] = 16
    open_s: Annotated[
        float,
        Flag(
            "open-seconds",
            HTTP,
            "seconds after its last change in which an open prompt that is not committed expires",
            low=0.001,
            high=86400,
        ),
    ] = 300.0
    max_body_bytes: MaxBodyBytes = 16 << 20
    keep_alive_s: KeepAlive = 630.0
    max_hidden_bytes: Annotated[
        int,
        Flag(
            "max-hidden-bytes",
            HTTP,
            'hidden states that one request may ask for, such as "16MiB", at 4 bytes a value; 0: none',
            low=0,
            unit="bytes",
        ),
    ] = 16 << 20
    allowed_image_hosts: Annotated[
        tuple[str, ...],
        Flag(
            "allowed-image-host",
            HTTP,
            "HOST or HOST:PORT from which images are fetched that requests name by URL; repeatable (default: none)",
        ),
    ] = ()
    max_images: Annotated[int, Flag("max-images", HTTP, "images in one request; 0: none", low=0)] = 16
    max_image_bytes: Annotated[
        int, Flag("max-image-bytes", HTTP, 'largest image file, such as "8MiB"', low=1, unit="bytes")
    ] = 8 << 20
    max_image_pixels: Annotated[
        int, Flag("max-image-pixels", HTTP, "pixels of the largest image, as its file says", low=1)
    ] = 16 << 20
    drain_timeout_s: Annotated[
        float, Flag("drain-timeout", SERVER, "seconds that open requests may take to finish after SIGTERM", low=0)
    ] = 30.0
    drain_grace_s: Annotated[
        float,
        Flag(
            "drain-grace",
            SERVER,
            "seconds after SIGTERM in which a server that is not ready any more still accepts requests, for routers "
            "and load balancers that have not noticed",
            low=0,
            high=3600,
        ),
    ] = 0.0
    served_model_name: Annotated[
        str, Flag("served-model-name", MODEL, "name of the model in the API (default: the value of --model)")
    ] = ""
    chat_template: Annotated[
        str, Flag("chat-template", MODEL, "file with a Jinja chat template to use in the place of the model's own")
    ] = ""
    tool_parser: Annotated[
        ToolParser,
        Flag("tool-parser", MODEL, "how the model writes tool calls; auto: found out from its chat template"),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Flag(
            "reasoning-parser",
            MODEL,
            "how the model marks its reasoning, which chats then have apart from their content; auto: found out from "
            "its chat template and tokens; none: it stays in the content",
        ),
    ] = "auto"
    cache_dir: Annotated[
        str,
        Flag(
            "cache-dir",
            SERVER,
            "folder for tokenizers and compiled code kept between starts (default: headrace in $XDG_CACHE_HOME or "
            "~/.cache)",
        ),
    ] = ""
    """Empty: nothing is kept."""
    metrics_names: MetricsNames = "headrace"
    log_level: Annotated[LogLevel, Flag("log-level", TELEMETRY, "least severe messages that are logged")] = "info"
    log_format: Annotated[
        LogFormat, Flag("log-format", TELEMETRY, "text, or json: one object a line, with the fields of requests")
    ] = "text"

    @property
    def serves_kv(self) -> bool:
        """Other servers fetch KV from this one: it has a control endpoint."""
        return self.role == "prefill" or self.kv_return

    @property
    def fetches_kv(self) -> bool:
        """It fetches KV from other servers."""
        return self.role == "decode" or bool(self.siblings or self.accept_returns)
