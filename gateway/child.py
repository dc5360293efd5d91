"""The gateway as a child process of `headrace serve`: its configuration comes on standard input.

SIGTERM, from the parent or from a service manager that sends it to all processes, drains it; the parent kills it when
it is to end at once.
"""

import sys

import msgspec

from headrace.core.config import GatewayConfig
from headrace.core.runtime.output import complain
from headrace.core.runtime.process import CONFIGURATION_MISTAKE, die_with_parent
from headrace.core.types.errors import ConfigError
from headrace.gateway.process import run
from headrace.server.launch.stop_signals import StopSignals


def main() -> int:
    """Entry point. Returns the exit status."""
    stop = StopSignals(most=1)
    die_with_parent(int(sys.argv[1]))
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig)
    try:
        return run(config, stop)
    except ConfigError as error:
        complain(error)
        return CONFIGURATION_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
