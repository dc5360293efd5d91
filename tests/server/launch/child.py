"""A child process for tests of the supervisor: exits with a given status, or waits until killed."""

import sys
import time

import msgspec


class Script(msgspec.Struct, frozen=True):
    """status: to exit with at once; None: wait until killed. more: further configuration."""

    status: int | None = None
    more: str = ""


def main() -> int:
    script = msgspec.json.decode(sys.stdin.buffer.read(), type=Script)
    if script.status is None:
        time.sleep(600)
    return script.status or 0


if __name__ == "__main__":
    sys.exit(main())
