"""The entry point of the command `headrace`."""

import signal
import sys


def main() -> int:
    """Load and run the command line. Returns the exit status. Ctrl-C while it is loaded ends the process without a
    traceback."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as under nohup
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headrace.server import cli

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
