"""KV pool in the memory layout that vLLM's NixlConnector reads: [layer][block][head][token][keys, values][head_dim]."""

import numpy as np

from headrace.core.types.kv.backends import PoolLayout
from headrace.core.types.kv.geometry import Geometry
from headrace.peer.shared_staging import SharedStaging


def vllm_layout(geometry: Geometry, pages: int) -> PoolLayout:
    """Layout of a pool of these pages; a page is a block. One layer's pages are a region of the connector."""
    [tensor] = geometry.tensors
    slot = tensor.planes * tensor.slot_bytes  # keys and values of a token lie side by side
    head = geometry.page_size * slot
    page = tensor.kv_heads * head
    layer = pages * page
    return PoolLayout(bytes=tensor.layers * layer, pages=pages, strides=(page, layer, tensor.slot_bytes, head, slot))


class VllmPool(SharedStaging):
    """Staging area of a gateway: prefill servers write into it, decode engines read from it."""

    def __init__(self, geometry: Geometry, pages: int) -> None:
        """geometry: of the whole model; its page size is the decode engine's block size."""
        self.layout = vllm_layout(geometry, pages)
        super().__init__(geometry, self.layout)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.layout.strides[0]

    @property
    def region_offsets(self) -> tuple[int, ...]:
        """Where each layer's blocks begin in the pool's memory."""
        return tuple(layer * self.layout.strides[1] for layer in range(self.geometry.layers))

    def zero_tail(self, first_page: int, tokens: int) -> None:
        """Clear what follows the last of these tokens in its page: a decode engine reads whole blocks, and must not see
        another prompt's KV there. first_page: holds the first of the tokens."""
        used = tokens % self.geometry.page_size
        if used:
            page = first_page + tokens // self.geometry.page_size
            tail = self.view(page, used, self.geometry.page_size - used)
            tail[...] = np.uint8(0)
