"""Ranks as actors of a Ray cluster, one in each bundle of a placement group. The only module that imports ray."""

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.core.types.errors import ConfigError
from headrace.server.cluster.options import UpOptions
from headrace.server.cluster.rank_process import RankProcess

log = logging.getLogger(__name__)

LOST = -1  # exit status of a rank whose worker or node is gone
CONNECT_S = 10.0
ASK_S = 30.0  # longest wait for an answer of a worker


class RayRanks:
    """The places of the ranks on the cluster, reserved until close(), and a worker in each."""

    def __init__(self, options: UpOptions, ranks: int) -> None:
        """Connect. Raises ConfigError when there is no cluster."""
        try:
            _check_port(options.ray)
            ray.init(address=options.ray, namespace="headrace", configure_logging=False)
        except (OSError, ValueError, RayError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"--ray {options.ray}: no Ray cluster can be reached: {reason}") from error
        self._options = options
        self._ranks = range(ranks)
        self._resources = {"CPU": options.rank_cpus, "GPU": self._gpus(options)}
        self._group: PlacementGroup | None = None
        self._workers: dict[int, Any] = {}

    @property
    def own_address(self) -> str:
        """Address at which the cluster reaches this machine."""
        return str(ray.util.get_node_ip_address())

    async def place(self) -> None:
        """Reserve the places and start the workers that are missing. Raises ConfigError when the cluster has no room
        within the timeout."""
        if self._group is None:
            bundle = {name: value for name, value in self._resources.items() if value}
            self._group = placement_group([bundle] * len(self._ranks), strategy=self._options.strategy)
        try:
            await asyncio.wait_for(_result(self._group.ready()), self._options.place_timeout_s)
        except TimeoutError:
            wanted = ", ".join(f"{value:g} {name}" for name, value in self._resources.items() if value)
            free = {name: value for name, value in ray.available_resources().items() if name in self._resources}
            raise ConfigError(
                f"--ray {self._options.ray}: no room for {len(self._ranks)} ranks of {wanted} each "
                f"({self._options.strategy}) within {self._options.place_timeout_s:g} s; free are "
                f"{', '.join(f'{value:g} {name}' for name, value in sorted(free.items())) or 'none'}"
            ) from None
        worker = ray.remote(RankProcess)
        for rank in self._ranks:
            if rank not in self._workers:
                where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
                self._workers[rank] = worker.options(
                    scheduling_strategy=where,
                    num_cpus=self._resources["CPU"],
                    num_gpus=self._resources["GPU"],
                    max_concurrency=2,
                    name=None,
                ).remote()

    def nodes(self) -> list[str]:
        """Address of the node of each rank."""
        assert self._group is not None, "placed"
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [str(addresses[nodes[rank]]) for rank in self._ranks]

    async def free_port(self, rank: int) -> int:
        """A free port on the node of a rank. Raises RayError when its worker is gone."""
        return int(await asyncio.wait_for(_result(self._workers[rank].port.remote()), ASK_S))

    async def knows_key(self, rank: int, digest: str) -> bool:
        """Whether a rank's worker has the stage key in its environment; False where it does not answer."""
        try:
            return bool(await asyncio.wait_for(_result(self._workers[rank].knows_key.remote(digest)), ASK_S))
        except (RayError, TimeoutError):
            return False

    async def run(self, rank: int, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a rank's process until it exits. Returns its exit status, LOST when its worker is gone: place() then
        starts another one, on another node if need be."""
        try:
            return int(await _result(self._workers[rank].run.remote(list(arguments), dict(environment))))
        except RayActorError as error:
            log.warning("the worker of rank %d is gone: %s", rank, str(error).strip().partition("\n")[0])
            self._workers.pop(rank, None)
            return LOST

    async def stop(self) -> None:
        """Kill the processes of all ranks."""
        stopping = [_result(worker.stop.remote()) for worker in self._workers.values()]
        await asyncio.wait([asyncio.ensure_future(each) for each in stopping], timeout=ASK_S) if stopping else None

    def close(self) -> None:
        """End the workers, give the places back and leave the cluster."""
        for worker in self._workers.values():
            ray.kill(worker)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    @staticmethod
    def _gpus(options: UpOptions) -> float:
        if options.rank_gpus is not None:
            return options.rank_gpus
        return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0


def _check_port(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


async def _result(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())
