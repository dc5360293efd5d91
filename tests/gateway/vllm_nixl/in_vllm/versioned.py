"""vLLM's NixlConnector, of its next version."""

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

metadata.NIXL_CONNECTOR_VERSION += 1
__all__ = ["NixlConnector"]
