"""The scheduler's events and effects, as unions of all messages that it takes and gives."""

from headrace.core.messages.forecasts import ForecastMade, MakeForecast
from headrace.core.messages.frontend import AnyFrontendRequest
from headrace.core.messages.kv_events import KvEventMessage, ReplicaKvEvent
from headrace.core.messages.membership import JoinProgress
from headrace.core.messages.orders import AnyOrder, ReplicaOrder
from headrace.core.messages.peers import (
    ControlClientEffect,
    ControlClientEvent,
    ControlServerEffect,
    ControlServerEvent,
)
from headrace.core.messages.replies import AnySchedulerReply
from headrace.core.messages.stage_events import AnyStageEvent, StageProgress, StageSilence

StageReport = AnyStageEvent | StageSilence | StageProgress | JoinProgress
Event = AnyFrontendRequest | StageReport | ControlServerEvent | ControlClientEvent | ForecastMade
Effect = (
    AnyOrder
    | ReplicaOrder
    | ControlServerEffect
    | ControlClientEffect
    | AnySchedulerReply
    | KvEventMessage
    | ReplicaKvEvent
    | MakeForecast
)


class Effects:
    """Collects effects in the order in which they are decided; numbers the orders."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self._seq = 0

    def next_seq(self) -> int:
        """The number of the next order. Each one taken must be used, at once."""
        self._seq += 1
        return self._seq

    def add(self, effect: Effect) -> None:
        """Append an effect."""
        self._effects.append(effect)

    def take(self) -> list[Effect]:
        """The effects since the last call."""
        effects, self._effects = self._effects, []
        return effects
