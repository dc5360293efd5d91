"""Opens the host and disk tiers that a stage is configured with."""

from collections.abc import Callable

from headrace.core.config import StageConfig
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.copier import Copier, CopyEvent
from headrace.engine.kv.tiers.disk_store import DiskStore
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pool_pages import PoolPages
from headrace.engine.kv.tiers.record import Origin


def open_tiers(
    config: StageConfig, pool: KVPool, fingerprint: str, report: Callable[[CopyEvent], None]
) -> Copier | None:
    """The copy thread of a stage with its tiers, not yet started; None without tiers.

    report: see Copier. Raises ConfigError when the memory or the directory cannot be had.
    """
    engine, geometry = config.engine, pool.geometry
    if not engine.host_pages and not engine.disk_path:
        return None
    disk = None
    if engine.disk_path:
        budget = int((engine.disk_gib << 30) * _share(config))
        stage = config.layout.place(config.rank).stage
        shard = config.rank - config.layout.rank(stage)
        disk = DiskStore(engine.disk_path, Origin(fingerprint, geometry, stage, shard, config.layout.tp), budget)
    host = None
    if engine.host_pages:
        pinned = pool.tensor.device.type == "cuda"
        host = HostStore(engine.host_pages, geometry.page_bytes, pinned=pinned)
    return Copier(config.rank, PoolPages(pool), host=host, disk=disk, report=report)


def _share(config: StageConfig) -> float:
    """This rank's share of the disk: that of the layers, so that all stages have about as many slots, divided by the
    ranks of the stage."""
    layers, layout = config.engine.pp_layers, config.layout
    share = layers[layout.place(config.rank).stage] / sum(layers) if layers else 1 / layout.pp
    return share / (layout.dp * layout.tp)
