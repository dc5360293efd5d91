"""Pages of a pool as the copier sees them: in place on the CPU, by copies elsewhere."""

from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.types.kv.geometry import Geometry
from headrace.engine.kv.device_copies import DeviceCopies
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.disk_store import DiskStore
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pages import DevicePage, PoolPages, TierStore
from headrace.engine.kv.tiers.record import Origin
from tests.engine.kv.tiers.pages import header

GEOMETRY = Geometry("bfloat16", layers=3, kv_heads=2, head_dim=4, page_size=8)


class HostCopies:
    """DeviceCopies, for a "GPU" whose memory is that of the CPU."""

    def to_host(self, part: Tensor) -> Tensor:
        return part.clone()

    def copy_to_host(self, part: Tensor, host: Tensor) -> None:
        host.copy_(part)

    def to_device(self, target: Tensor, values: Tensor) -> None:
        target.copy_(values)


def test_a_page_of_the_pool_is_all_of_its_bytes_in_place() -> None:
    pool = KVPool(GEOMETRY, 5)
    pool.tensor.normal_()
    pages = PoolPages(pool)
    assert pages.page_bytes == GEOMETRY.page_bytes
    data = pages.page(3).view()
    assert torch.equal(torch.from_numpy(data).view(torch.bfloat16).view(pool.tensor[3].shape), pool.tensor[3])
    pages.page(1).copy_from(data)
    assert torch.equal(pool.tensor[1], pool.tensor[3])
    for page in (-1, 5):
        with pytest.raises(IndexError, match=f"page {page} is outside the pool of 5"):
            pages.page(page)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_pages_on_a_device_go_through_its_copies(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("kv"))
    size = GEOMETRY.page_bytes
    store: TierStore = HostStore(4, size) if kind == "host" else DiskStore(folder, Origin("f", GEOMETRY), 40 * size)
    memory = torch.randint(0, 256, (2, size), dtype=torch.uint8)
    copies = cast(DeviceCopies, HostCopies())
    store.put(2, DevicePage(memory[0], copies), header(1))
    store.get(2, DevicePage(memory[1], copies))
    assert torch.equal(memory[0], memory[1])
    assert np.array_equal(DevicePage(memory[0], copies).view(), memory[0].numpy())
    store.close()
