"""How stages that somebody else has started (torchrun, Slurm, Kubernetes) join a scheduler (ZMQ, msgpack).

    stage ──JoinRequest──► scheduler ──Waiting──► until every rank has joined ──Admitted──► all of them
                              ──Refused──► a mistake: starting again will not help
                              ──Dismissed──► the group has ended: start again, and join the next one

A stage repeats its JoinRequest for as long as it lives, and every JoinRequest is answered: each side knows by it that
the other is there. Joins and orders go to the same socket of the scheduler, on connections of their own.
"""

import msgspec

from headrace.core.config import StageConfig


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A stage process asks to be stage `rank` of `world_size`.

    incarnation: random id of this process. key: the shared secret. session: of the group that has admitted it ("":
    none yet). version: of the program; orders are understood within one version only. host, data_port: where this
    stage's data socket listens; port 0 leaves it to the scheduler's configuration.
    """

    rank: int
    world_size: int
    incarnation: str
    version: str
    host: str
    data_port: int = 0
    key: str = ""
    session: str = ""


class JoinReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of what the scheduler says to a JoinRequest."""


class Waiting(JoinReply, frozen=True, kw_only=True):
    """The group is not complete; message says what is missing."""

    message: str


class Admitted(JoinReply, frozen=True, kw_only=True):
    """The group is complete, and this is all that the stage has to know, but for what only its own machine knows:
    the way to the scheduler and to the other stages, which of its devices to use, how many cores there are."""

    config: StageConfig


class Refused(JoinReply, frozen=True, kw_only=True):
    """This stage cannot take part, however often it is started."""

    code: str
    message: str


class Dismissed(JoinReply, frozen=True, kw_only=True):
    """The group that this stage belonged to has ended, and why."""

    message: str


class Gathering(msgspec.Struct, frozen=True, kw_only=True):
    """For the scheduler, inside its process: how far the stages have come together, in words for /ready."""

    message: str


AnswerMessage = Waiting | Admitted | Refused | Dismissed

# Codes of Refused.
WRONG_KEY = "wrong_key"
WRONG_VERSION = "wrong_version"
WRONG_WORLD_SIZE = "wrong_world_size"
WRONG_RANK = "wrong_rank"
UNREACHABLE_HOST = "unreachable_host"
