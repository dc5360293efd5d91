"""The layout of KV caches in vLLM: [layers][pages][heads][slots][K, V][head_dim]."""

from headrace.core.types.backends import PoolLayout
from headrace.core.types.geometry import Geometry


def vllm_layout(geometry: Geometry, pages: int) -> PoolLayout:
    """A pool of this many pages."""
    [tensor] = geometry.tensors
    plane = tensor.slot_bytes
    slot = 2 * plane
    head = geometry.page_size * slot
    page = geometry.kv_heads * head
    layer = pages * page
    return PoolLayout(bytes=geometry.layers * layer, pages=pages, strides=(page, layer, plane, head, slot))
