"""Flags of `headrace dynamo`. Needs nothing of Dynamo."""

import argparse
import os
from collections.abc import Mapping
from typing import Literal

import msgspec

from headrace.core.types.errors import ConfigError

DESCRIPTION = (
    "run a worker of NVIDIA Dynamo 1.6 in front of a prefill server, a decode server, or a gateway (which takes a "
    "prefill server's place before Dynamo's own vLLM decode workers)"
)
USAGE = "headrace dynamo {prefill,decode} --url URL [flags]"
KEY_VARIABLE = "HEADRACE_API_KEY"
MAX_WAIT_S = 86400

Role = Literal["prefill", "decode"]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is started with. Names of Dynamo's are those of its own workers' flags."""

    role: Role
    url: str
    """Of the server or gateway, without a slash at its end."""
    api_key: str
    model_path: str
    """Folder or hub id that has the tokenizer, for Dynamo's frontend; "" for what the server was started with."""
    wait_s: float
    """How long the server may take to become ready."""
    block_size: int
    """Tokens in a block of KV; 0 for the server's page size."""
    namespace: str
    component: str
    discovery_backend: str
    request_plane: str
    event_plane: str
    """"" for the one that Dynamo chooses."""
    tool_call_parser: str
    reasoning_parser: str
    chat_template: str


def add_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """Add them. Those that Dynamo's workers read from an environment variable are read from it here, too."""

    def dynamos(flag: str, variable: str, default: str, text: str) -> None:
        shown = f"{text}; also {variable}" + (f" (default: {default})" if default else "")
        section.add_argument(f"--{flag}", metavar="TEXT", default=environ.get(variable, default), help=shown)

    parser.add_argument("role", choices=("prefill", "decode"), help="what the server does for Dynamo")
    section = parser.add_argument_group("the server")
    section.add_argument("--url", required=True, help="http://HOST:PORT of the server or gateway")
    section.add_argument(
        "--api-key",
        metavar="TEXT",
        default=environ.get(KEY_VARIABLE, ""),
        help=f"one of its API keys, if it asks for one; also {KEY_VARIABLE}",
    )
    section.add_argument(
        "--model-path",
        metavar="PATH",
        default="",
        help="folder or hub id with the model's tokenizer and config.json (default: the server's --model)",
    )
    section.add_argument(
        "--wait",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="for which the server may take to become ready (default: 600)",
    )
    section.add_argument(
        "--block-size",
        type=_block_size,
        default=0,
        metavar="N",
        help="tokens in a block of the decode engines' KV, for a gateway (default: the server's page size)",
    )
    section = parser.add_argument_group("Dynamo")
    dynamos("namespace", "DYN_NAMESPACE", "dynamo", "namespace of the worker")
    section.add_argument("--component", default="", metavar="TEXT", help="(default: prefill, or backend for decode)")
    dynamos("discovery-backend", "DYN_DISCOVERY_BACKEND", "etcd", "etcd, kubernetes, file or mem")
    dynamos("request-plane", "DYN_REQUEST_PLANE", "tcp", "tcp or nats")
    dynamos("event-plane", "DYN_EVENT_PLANE", "", "zmq or nats")
    dynamos("tool-call-parser", "DYN_TOOL_CALL_PARSER", "", "by which the frontend finds tool calls")
    dynamos("reasoning-parser", "DYN_REASONING_PARSER", "", "by which the frontend finds reasoning")
    section.add_argument("--chat-template", default="", metavar="FILE", help="in the place of the tokenizer's own")


def settings_of(given: argparse.Namespace) -> WorkerSettings:
    """The settings of parsed flags. Raises ConfigError for a URL that is none."""
    url = given.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {given.url!r}; it has to be like http://HOST:PORT")
    return WorkerSettings(
        role=given.role,
        url=url,
        api_key=given.api_key,
        model_path=given.model_path,
        wait_s=given.wait,
        block_size=given.block_size,
        namespace=given.namespace,
        component=given.component or ("prefill" if given.role == "prefill" else "backend"),
        discovery_backend=given.discovery_backend,
        request_plane=given.request_plane,
        event_plane=given.event_plane,
        tool_call_parser=given.tool_call_parser,
        reasoning_parser=given.reasoning_parser,
        chat_template=given.chat_template,
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_WAIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0 and up to {MAX_WAIT_S}")
    return seconds


def _block_size(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {1 << 16}")
    return int(text)
