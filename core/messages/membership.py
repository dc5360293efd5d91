"""How external stages (started by torchrun, Slurm or Kubernetes) join a scheduler: ZMQ, msgpack.

    stage ──JoinRequest──► scheduler ──JoinPending──► until every rank has joined ──JoinAccepted──► all stages
                              ──JoinRefused──► a mistake of configuration: a restart does not help
                              ──GroupEnded───► the group has ended: restart, and join the next one

A stage repeats its JoinRequest for as long as it runs, and the scheduler answers every one, so that the messages serve
as heartbeats in both directions. Joins and orders go to the same socket of the scheduler, over separate connections.
"""

import msgspec

from headrace.core.config import StageConfig


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A process asks to become rank `rank` of `world_size`."""

    rank: int
    """The rank, counted from 0."""
    world_size: int
    """Ranks in the group."""
    incarnation: str
    """Random id of this process."""
    version: str
    """Version of Headrace; the messages between scheduler and stages are compatible within one version only."""
    host: str
    """Address where decode servers reach this stage's data socket."""
    data_port: int = 0
    """0: the port is taken from the scheduler's configuration."""
    key: str = ""
    """Shared secret (--stage-key)."""
    session: str = ""
    """Session of the group that admitted this process; empty before."""


class JoinReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of the scheduler's replies to a JoinRequest."""


class JoinPending(JoinReply, frozen=True, kw_only=True):
    """Not all ranks have joined yet."""

    message: str
    """Which ranks are missing."""


class JoinAccepted(JoinReply, frozen=True, kw_only=True):
    """All ranks have joined."""

    config: StageConfig
    """Complete but for what only the stage's machine knows: endpoint, rendezvous, device index, threads."""


class JoinRefused(JoinReply, frozen=True, kw_only=True):
    """This stage cannot become a member, however often it is started."""

    code: str
    """One of the codes below."""
    message: str


class GroupEnded(JoinReply, frozen=True, kw_only=True):
    """The group that this stage was a member of has ended."""

    message: str
    """Why."""


class JoinProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Event inside the scheduler process: which stages have joined, as text for /ready."""

    message: str


AnyJoinReply = JoinPending | JoinAccepted | JoinRefused | GroupEnded

# Codes of JoinRefused.
WRONG_KEY = "wrong_key"
WRONG_VERSION = "wrong_version"
WRONG_WORLD_SIZE = "wrong_world_size"
WRONG_RANK = "wrong_rank"
UNREACHABLE_HOST = "unreachable_host"
