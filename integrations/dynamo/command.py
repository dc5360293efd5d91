"""The command `headrace dynamo`."""

import argparse

from headrace.integrations.dynamo.options import settings_of


def main(given: argparse.Namespace) -> int:
    """Run a worker until SIGTERM or Ctrl-C. Returns the exit status. Raises ConfigError, and ModuleNotFoundError where
    Dynamo is not installed."""
    settings = settings_of(given)
    from headrace.integrations.dynamo.worker import run  # needs Dynamo

    run(settings)
    return 0
