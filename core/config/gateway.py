"""Configuration of a gateway: prefill servers on one side, decode engines without anything of ours on the other."""

from typing import Annotated, Literal

import msgspec

from headrace.core.config.flag import HANDOFF, HTTP, SECURITY, SERVER, TELEMETRY, Flag, port_flag
from headrace.core.config.server import (
    GATEWAY_PORT,
    AllowedHosts,
    KeepAlive,
    LogFormat,
    LogLevel,
    MaxBodyBytes,
    MetricsNames,
    Remote,
    Routing,
)

DecodeEngineKind = Literal["vllm", "sglang"]
GatewayFallback = Literal["error", "recompute"]


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The process of `headrace gateway`."""

    decode: Annotated[
        tuple[str, ...],
        Flag(
            "decode",
            SERVER,
            "URL of a decode engine, or URL=HOST:PORT with its side channel (default: port 5600 of the URL's host); "
            "give it once per engine",
        ),
    ] = ()
    """Parsed by core/types/peers/decode_address.py."""
    prefill: Annotated[
        tuple[str, ...], Flag("prefill", SERVER, "URL of a Headrace prefill server; give it once per server")
    ] = ()
    decode_engine: Annotated[
        DecodeEngineKind,
        Flag(
            "decode-engine",
            SERVER,
            "what the decode engines are; sglang was tested with engines on CPUs, never on a GPU",
        ),
    ] = "vllm"
    sglang_page_size: Annotated[
        int, Flag("sglang-page-size", SERVER, "the --page-size of SGLang decode engines", low=1, high=1024)
    ] = 1
    decode_model_card: Annotated[
        str,
        Flag(
            "decode-model-card",
            SERVER,
            "for vLLM decode engines without vLLM's API server, as Dynamo's: their entry of GET /v1/models in JSON, "
            'as {"id": "NAME", "root": "their --model", "max_model_len": 4096}',
        ),
    ] = ""
    """Empty: they are asked."""
    allow_untested: Annotated[
        bool,
        Flag("allow-untested", SERVER, "serve decode engines of versions that were not tested with this gateway, too"),
    ] = False
    model_check: Annotated[
        bool,
        Flag(
            "model-check",
            SERVER,
            "compare the first tokens of short prompts between decode engines and prefill servers at the start",
        ),
    ] = True
    drain_timeout_s: Annotated[
        float,
        Flag(
            "drain-timeout",
            SERVER,
            "seconds that open requests, and KV that decode engines have not read yet, may take to finish after "
            "SIGTERM",
            low=0,
        ),
    ] = 30.0
    host: Annotated[str, Flag("host", HTTP, "address the HTTP server binds to")] = "127.0.0.1"
    port: Annotated[
        int, port_flag("port", HTTP, "HTTP port, which routers take for a prefill server; 0: a free one")
    ] = GATEWAY_PORT
    max_body_bytes: MaxBodyBytes = 16 << 20
    keep_alive_s: KeepAlive = 630.0
    side_channel_host: Annotated[
        str,
        Flag("side-channel-host", HANDOFF, "address that decode engines are told, and that the side channel binds to"),
    ] = "127.0.0.1"
    side_channel_port: Annotated[
        int,
        port_flag(
            "side-channel-port",
            HANDOFF,
            "port of the side channel; 0: a free one, or for SGLang decode engines the one after --bootstrap-port",
        ),
    ] = 0
    bootstrap_port: Annotated[
        int,
        port_flag(
            "bootstrap-port",
            HANDOFF,
            "port where SGLang decode engines and routers find the gateway, at --side-channel-host; 0: a free one",
        ),
    ] = 8998
    bootstrap_timeout_s: Annotated[
        float,
        Flag(
            "bootstrap-timeout",
            HANDOFF,
            "seconds that a request waits for the SGLang decode engine to ask for its room, and a room for its request",
            low=1,
        ),
    ] = 300.0
    device: Annotated[
        str,
        Flag(
            "device",
            HANDOFF,
            "memory that holds KV for vLLM decode engines: cpu, cuda[:index], or auto (cuda where there is a GPU)",
        ),
    ] = "cpu"
    pool_tokens: Annotated[
        int,
        Flag("pool-tokens", HANDOFF, "tokens of KV held for decode engines; 0: four of the longest prompts", low=0),
    ] = 0
    lease_s: Annotated[
        float,
        Flag("lease", HANDOFF, "seconds for which KV is held without a sign of the decode engine", low=1),
    ] = 30.0
    lease_limit_s: Annotated[float, Flag("lease-limit", HANDOFF, "seconds for which KV is held in all", low=1)] = 600.0
    fallback: Annotated[
        GatewayFallback,
        Flag(
            "fallback",
            HANDOFF,
            "when no prefill server can compute a prompt: error passes it on, recompute has the decode engine compute "
            "the prompt",
        ),
    ] = "error"
    remote: Annotated[
        Remote,
        Flag(
            "remote",
            HANDOFF,
            "which prompts go to a prefill server: always all that can be handed over; never none; cost those that are "
            "predicted to add less waiting there, the decode engine computes the others (vLLM)",
        ),
    ] = "always"
    decode_prefill_rate: Annotated[
        float,
        Flag(
            "decode-prefill-rate",
            HANDOFF,
            "with --remote cost: prompt tokens a second that a decode engine computes; 0: learnt from its metrics",
            low=0,
        ),
    ] = 0.0
    decode_kv_events_port: Annotated[
        int,
        port_flag(
            "decode-kv-events-port",
            HANDOFF,
            "with --remote cost: port on which decode engines publish their KV events, at the hosts of their URLs; 0: "
            "what was sent to a single engine counts as cached there",
        ),
    ] = 0
    routing: Annotated[
        Routing,
        Flag(
            "routing",
            HANDOFF,
            "how a prefill server is chosen: score by seconds queued, prompt cached and to be loaded; least-load by "
            "prompt tokens sent and not answered",
        ),
    ] = "score"
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
    prefill_api_key: Annotated[
        str,
        Flag(
            "prefill-api-key",
            SECURITY,
            "API key to send to the prefill servers",
            secret=True,
            variable="HEADRACE_PREFILL_API_KEY",
        ),
    ] = ""
    decode_api_key: Annotated[
        str,
        Flag(
            "decode-api-key",
            SECURITY,
            "API key to send to the decode engines",
            secret=True,
            variable="HEADRACE_DECODE_API_KEY",
        ),
    ] = ""
    curve_key: Annotated[
        str,
        Flag(
            "curve-key",
            SECURITY,
            "file NAME.key_secret written by headrace keys; encrypts the connections to prefill servers, not those to "
            "decode engines",
        ),
    ] = ""
    curve_server_keys: Annotated[
        tuple[str, ...],
        Flag(
            "curve-server-key",
            SECURITY,
            "public key file of the prefill servers, or HOST=FILE, HOST:PORT=FILE of some of them",
        ),
    ] = ()
    insecure_decode: Annotated[
        bool,
        Flag(
            "insecure-decode",
            SECURITY,
            "allow a side channel beyond loopback, or beside --curve-key: who reaches it reads the KV of all prompts",
        ),
    ] = False
    insecure: Annotated[bool, Flag("insecure", SECURITY, "allow an HTTP port beyond loopback without an API key")] = (
        False
    )
    metrics_names: MetricsNames = "headrace"
    """Of a gateway for vLLM."""
    log_level: Annotated[LogLevel, Flag("log-level", TELEMETRY, "least severe messages that are logged")] = "info"
    log_format: Annotated[
        LogFormat, Flag("log-format", TELEMETRY, "text, or json: one object a line, with the fields of requests")
    ] = "text"


class GatewaySlices(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a gateway as slices, of which it has one."""

    gateway: GatewayConfig = GatewayConfig()
