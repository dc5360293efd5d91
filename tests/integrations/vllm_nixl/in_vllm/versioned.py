"""vLLM's NixlConnector, of a version that no release has."""

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

metadata.NIXL_CONNECTOR_VERSION = 99
__all__ = ["NixlConnector"]
