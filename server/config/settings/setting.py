"""What a row of the table of settings says."""

from typing import Literal

import msgspec

from headrace.core.config import Config

SliceName = Literal["model", "engine", "scheduler", "transfer", "group", "kv_events", "server"]
Kind = Literal["text", "integer", "size", "number", "switch", "choice", "list", "integers", "choices"]


class Setting(msgspec.Struct, frozen=True):
    """One key. slice and field say where it lands in Config; low and high are inclusive bounds of numbers."""

    key: str
    slice: SliceName
    field: str
    kind: Kind
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    def value(self, config: Config) -> object:
        """What a configuration holds under this key."""
        slices = {
            "model": config.model,
            "engine": config.engine,
            "scheduler": config.scheduler,
            "transfer": config.transfer,
            "group": config.group,
            "kv_events": config.kv_events,
            "server": config.server,
        }
        return msgspec.structs.asdict(slices[self.slice])[self.field]


PORT = 65535  # the highest
