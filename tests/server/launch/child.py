"""A child process for the tests of the supervisor: it ends as it is told, or waits to be ended."""

import sys
import time

import msgspec


class Script(msgspec.Struct, frozen=True):
    """status: to end with, at once; None waits for whoever kills it."""

    status: int | None = None


def main() -> int:
    script = msgspec.json.decode(sys.stdin.buffer.read(), type=Script)
    if script.status is None:
        time.sleep(600)
    return script.status or 0


if __name__ == "__main__":
    sys.exit(main())
