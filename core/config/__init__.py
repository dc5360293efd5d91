"""Configuration slices: frozen structs whose annotations declare every user setting once."""

from headrace.core.config.config import Config
from headrace.core.config.flag import Flag
from headrace.core.config.gateway import GatewayConfig
from headrace.core.config.model import (
    AttentionChoice,
    Compile,
    CudaGraphs,
    DecoderChoice,
    Dtype,
    EngineConfig,
    ExpertExchange,
    MlaForm,
    ModelConfig,
    Quantize,
)
from headrace.core.config.recording import RecordingConfig
from headrace.core.config.scheduler import Policy, SchedulerConfig
from headrace.core.config.server import LogFormat, Role, Routing, ServerConfig
from headrace.core.config.stages import STAGE_KEY_VARIABLE, GroupConfig, Links, StageConfig
from headrace.core.config.tracing import TracingConfig
from headrace.core.config.transfer import KvEventsConfig, TransferConfig

__all__ = [
    "STAGE_KEY_VARIABLE",
    "AttentionChoice",
    "Compile",
    "Config",
    "CudaGraphs",
    "DecoderChoice",
    "Dtype",
    "EngineConfig",
    "ExpertExchange",
    "Flag",
    "GatewayConfig",
    "GroupConfig",
    "KvEventsConfig",
    "Links",
    "LogFormat",
    "MlaForm",
    "ModelConfig",
    "Policy",
    "Quantize",
    "RecordingConfig",
    "Role",
    "Routing",
    "SchedulerConfig",
    "ServerConfig",
    "StageConfig",
    "TracingConfig",
    "TransferConfig",
]
