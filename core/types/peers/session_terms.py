"""The terms of an open session: what a control endpoint has agreed with the other server, and stages need to know.

One value goes from the control endpoint through the scheduler to the stages.
"""

import msgspec

from headrace.core.types.kv.backends import ZMQ, PoolMemory
from headrace.core.types.kv.geometry import Geometry


class PeerTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A session with a decode peer, as the prefill side has it."""

    session: str
    geometries: tuple[Geometry, ...]
    """Geometries of the pools of the peer's stages, in stage order: one or more, all of one page size."""

    window_bytes: int
    """Payload that may be unacknowledged on each data connection."""

    backend: str = ZMQ
    """How bytes are moved, see core/types/kv/backends.py."""

    memory: tuple[PoolMemory, ...] = ()
    """The stages' pools, for a backend that writes into them; otherwise empty."""


class PrefillTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A session with a prefill server, as the decode side has it."""

    session: str
    """Secret that the prefill server's control endpoint gave us."""

    endpoints: tuple[str, ...]
    """Data endpoints of its stages, in stage order, such as tcp://10.0.0.5:7001."""

    geometries: tuple[Geometry, ...]
    """Geometries of the pools of its stages, in stage order."""

    window_bytes: int
    """Payload that it may leave unacknowledged on each data connection."""

    backend: str = ZMQ
    """How bytes are moved."""

    server_key: str = ""
    """Its CURVE public key; "" where connections are in the clear."""

    stage_replicas: tuple[int, ...] = ()
    """Data-parallel replica of each of its stages; empty: there is one."""
