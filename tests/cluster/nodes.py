"""A Ray cluster of three nodes with one CPU each: `python -m tests.cluster.nodes`. Prints its address, then removes the
node of a raylet for each process id that it reads, until its input ends."""

import sys
from typing import Any

from ray.cluster_utils import Cluster


def raylets(node: Any) -> set[int]:
    """Their process ids."""
    return {info.process.pid for kind, infos in node.all_processes.items() if kind == "raylet" for info in infos}


def main() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.add_node(num_cpus=1, object_store_memory=80_000_000, include_dashboard=False)
    print(f"address {cluster.address}", flush=True)
    for line in sys.stdin:
        cluster.remove_node(next(node for node in cluster.worker_nodes if int(line) in raylets(node)))
        print("removed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
