"""The version of this installation."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def headrace_version() -> str:
    """From the installed package, whose files are read once; a tree that is not installed has none."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "not installed"
