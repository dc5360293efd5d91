"""Releases of vLLM that the gateway serves, and the version of NixlConnector that each speaks. Pure.

A new release needs a row here and a run of its tests: `make test-vllm`. The fields of a handshake are those of the
newest version; older ones leave out what they do not know, and ignore what they get of it.
"""

RELEASES = {"0.30.0": 11, "0.31.0": 13, "0.32.0": 14, "0.33.0": 15}
"""Version of NixlConnector by release, in their order."""


def connector_version(vllm_version: str) -> int:
    """The version of NixlConnector of a release; of another one that of the nearest release before it, or of the first
    one."""
    before = [each for each in RELEASES if _order(each) <= _order(vllm_version)]
    return RELEASES[before[-1] if before else next(iter(RELEASES))]


def _order(version: str) -> tuple[int, ...]:
    """Numbers of a version up to the first part that is none: 0.33.1rc2 is (0, 33, 1)."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = len(part) - len(part.lstrip("0123456789"))
        if not digits:
            break
        numbers.append(int(part[:digits]))
        if digits < len(part):
            break
    return tuple(numbers)
