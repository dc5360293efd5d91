"""The response to GET /query: where the control endpoint of a prefill server is. It needs no API key."""

from urllib.parse import urlsplit

import msgspec

_WORKER = "0"  # the only data-parallel rank, tensor-parallel rank and worker


class _Worker(msgspec.Struct):
    engine_id: str
    worker_addr: dict[str, dict[str, str]]


class ControlEndpoint(msgspec.Struct, frozen=True):
    """Where a prefill server's control endpoint is."""

    instance: str
    """Id of this run of the server."""
    port: int
    """TCP port, 1 to 65535."""


def parse_query(content: bytes) -> ControlEndpoint:
    """The control endpoint that GET /query names. Raises ValueError (msgspec.DecodeError among them) for any other
    content."""
    workers = msgspec.json.decode(content, type=dict[str, _Worker])
    worker = workers.get(_WORKER)
    address = "" if worker is None else worker.worker_addr.get(_WORKER, {}).get(_WORKER, "")
    port = urlsplit(address).port
    if worker is None or not port:
        raise ValueError("no control endpoint is named")
    return ControlEndpoint(worker.engine_id, port)
