"""The command `headrace gateway`."""

import argparse
from collections.abc import Mapping

from headrace.server.config.gateway import load_gateway

DESCRIPTION = (
    "hand KV of Headrace prefill servers to decode engines on which nothing of Headrace is installed: routers take the "
    "gateway for a prefill server of the engine's own"
)
USAGE = "headrace gateway --decode URL[=HOST:PORT] --prefill URL [flags]"


def main(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run a gateway until a signal. Returns the exit status. Raises ConfigError."""
    config = load_gateway(vars(given), environ)
    from headrace.gateway.process import run  # loads NIXL

    return run(config)
