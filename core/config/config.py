"""The configuration of one server, as slices. Each part of the server gets its own slice only."""

import msgspec

from headrace.core.config.model import EngineConfig, ModelConfig
from headrace.core.config.recording import RecordingConfig
from headrace.core.config.scheduler import SchedulerConfig
from headrace.core.config.server import ServerConfig
from headrace.core.config.stages import GroupConfig
from headrace.core.config.tracing import TracingConfig
from headrace.core.config.transfer import KvEventsConfig, TransferConfig


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All slices of one server; parsed once by server/config/load.py."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    transfer: TransferConfig = TransferConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    group: GroupConfig = GroupConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
    tracing: TracingConfig = TracingConfig()
    recording: RecordingConfig = RecordingConfig()

    @property
    def model_name(self) -> str:
        """What answers and other servers call the model."""
        return self.server.served_model_name or self.model.model
