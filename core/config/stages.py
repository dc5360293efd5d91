"""Configuration of the pipeline stages: who starts them, and what each stage process is told."""

from typing import Annotated, Literal

import msgspec

from headrace.core.config.flag import SECURITY, STAGES, Flag, port_flag
from headrace.core.config.model import EngineConfig, ModelConfig
from headrace.core.config.server import LogFormat, Role
from headrace.core.config.transfer import TransferConfig
from headrace.core.types.ranks.coordinate import Rules
from headrace.core.types.ranks.external import ExternalMember, parse_member
from headrace.core.types.ranks.layout import Layout

DpSync = Literal["cpu", "device"]
Links = Literal["auto", "device", "host"]
STAGE_KEY_VARIABLE = "HEADRACE_STAGE_KEY"


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the group of stages is started, and where external stages join it."""

    start: Annotated[
        Literal["local", "external"],
        Flag(
            "stages",
            STAGES,
            "local: this server starts its stages; external: torchrun, srun or Kubernetes starts them (headrace stage) "
            "and they join",
        ),
    ] = "local"
    host: Annotated[str, Flag("stage-host", STAGES, "address where external stages join")] = "127.0.0.1"
    port: Annotated[int, port_flag("stage-port", STAGES, "port where external stages join; 0: a free one")] = 0
    key: Annotated[
        str,
        Flag("stage-key", SECURITY, "key that external stages must show", secret=True, variable=STAGE_KEY_VARIABLE),
    ] = ""
    dp_external: Annotated[
        str,
        Flag(
            "dp-external",
            STAGES,
            "RANK/SIZE@HOST:PORT: this server is one of SIZE that share experts, each with its own scheduler and one "
            "replica; they meet at HOST:PORT, an address of server 0 (default: none)",
        ),
    ] = ""
    dp_sync: Annotated[
        DpSync,
        Flag(
            "dp-sync",
            STAGES,
            "where servers with --dp-external agree on each forward pass; cpu: among their hosts, so that no device is "
            "waited for, device: among their GPUs",
        ),
    ] = "cpu"
    links: Annotated[
        Links,
        Flag(
            "links",
            STAGES,
            "how ranks on GPUs reach each other; device: by NCCL, host: through host memory, auto: by NCCL unless two "
            "of them share a GPU",
        ),
    ] = "auto"

    @property
    def member(self) -> ExternalMember | None:
        """Which server of a group this is; None for one of its own. Raises ConfigError for a malformed flag."""
        return parse_member(self.dp_external) if self.dp_external else None


class StageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the process of one rank is told when it starts."""

    rank: int
    """This process's rank in the layout."""
    endpoint: str
    """The scheduler's order socket."""
    model: ModelConfig
    engine: EngineConfig
    transfer: TransferConfig
    log_level: str = "info"
    log_format: LogFormat = "text"
    layout: Layout = Layout()
    """The ranks of the group."""
    epoch: int = 0
    """Counts the starts of the group, so that messages of an earlier group are not taken for those of this one."""
    session: str = ""
    """Secret of this start of the group; "" for stages that are the server's own processes."""
    rendezvous: str = ""
    """HOST:PORT of the torch.distributed store."""
    rendezvous_hosted: bool = False
    """Whether torchrun's agent hosts the store; else rank 0 does."""
    credits: int = 2
    """Forward passes that the scheduler may have in flight."""
    stage_timeout_s: float = 120.0
    """Longest wait for another stage, in seconds."""
    measure_tokens: int = 0
    """Chunk length around which the stage's speed is measured before it is ready; 0: not at all."""
    role: Role = "colocated"
    """The server's role."""
    member: ExternalMember | None = None
    """Which server of a group that shares experts this is; None for one of its own."""
    rules: Rules = Rules()
    """What the servers of the group agree on follows from these."""
    dp_sync: DpSync = "cpu"
    """Where they agree."""
    links: Links = "auto"
    """How ranks on GPUs reach each other."""

    @property
    def shared_layout(self) -> Layout:
        """The ranks that have collectives in common: those of the server, or of all servers of its group."""
        if self.member is None:
            return self.layout
        return Layout(pp=self.layout.pp, dp=self.member.size, tp=self.layout.tp)

    @property
    def shared_rank(self) -> int:
        """This rank's number in the shared layout."""
        if self.member is None:
            return self.rank
        return self.shared_layout.rank(self.stage, self.member.rank, self.layout.place(self.rank).shard)

    @property
    def name(self) -> str:
        """This rank in messages."""
        return self.layout.name(self.rank)

    @property
    def stage(self) -> int:
        """Its pipeline position, from 0."""
        return self.layout.place(self.rank).stage

    @property
    def replica(self) -> int:
        """Its data-parallel replica, from 0."""
        return self.layout.place(self.rank).replica

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.layout.pp
