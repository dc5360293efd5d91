"""The command `headrace dynamo`."""

import argparse

from headrace.integrations.dynamo.options import settings_of


def main(given: argparse.Namespace) -> int:
    """Run a worker until SIGTERM or Ctrl-C. Returns the exit status. Raises ConfigError, and ModuleNotFoundError where
    Dynamo is not installed."""
    settings = settings_of(given)
    import uvloop  # Dynamo's

    from headrace.integrations.dynamo.worker import run_worker

    uvloop.run(run_worker(settings))
    return 0
