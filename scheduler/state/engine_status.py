"""What the scheduler knows about its stages while all of them are up."""

from headrace.core.config import SchedulerConfig
from headrace.scheduler.costs.chunking import Cost


class EngineStatus:
    """Whether the stages are up, and what they said of their model."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.stages = config.layout.ranks
        """All ranks: what is said of a stage elsewhere holds for each of them."""

        self.offering: tuple[int, ...] = tuple(self.stages)
        """Ranks that offer KV to peers: of those that have the same KV, one."""

        self.ready = False
        """Every stage has loaded and warmed up, and none has failed since."""

        self.vocab_size = config.vocab_size
        """Token ids are below this; 0 while it is not known."""

        self.costs: tuple[Cost, ...] = ()
        """What computing takes each stage; empty when all chunks of a prompt have one length."""

        self.silent: dict[int, str] = {}
        """What stages do that are up and do not answer, by rank."""

        self.silent_until: dict[int, float] = {}
        """When a stage was last known not to answer, by rank: what peers say to it is not read then."""

    def start(self, vocab_size: int, costs: tuple[Cost, ...], offering: tuple[int, ...]) -> None:
        """Every stage is up."""
        self.offering = offering
        self.ready = True
        self.vocab_size = vocab_size
        self.costs = costs

    def stop(self) -> None:
        """A stage has failed, or all were told to end."""
        self.ready = False
        self.silent.clear()
        self.silent_until.clear()
