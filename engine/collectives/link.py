"""Failure of the connection to another rank."""

from collections.abc import Iterator
from contextlib import contextmanager


class LinkBroken(Exception):
    """The connection to another rank is lost. The group cannot go on and is restarted as a whole."""


@contextmanager
def breakable() -> Iterator[None]:
    """Turn the RuntimeError that torch.distributed raises for a lost connection into LinkBroken; its text differs by
    backend."""
    try:
        yield
    except RuntimeError as error:
        raise LinkBroken(str(error)) from error
