"""The version of this installation."""

from importlib.metadata import PackageNotFoundError, version


def headrace_version() -> str:
    """From the installed package; a tree that is not installed has none."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "not installed"
