"""The entry point of the command `headrace`."""

import sys

try:
    import signal

    from headrace.core.runtime.signals import fork_from_init
except KeyboardInterrupt:  # Ctrl-C before main() takes care of it
    sys.exit(130)


def main() -> int:
    """Load and run the command line. Returns the exit status. Ctrl-C while it is loaded ends the process without a
    traceback. As the first process of a container it runs the command in another one, and is its init."""
    if (status := fork_from_init()) is not None:
        return status
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as under nohup
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headrace.cli import commands as cli

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
