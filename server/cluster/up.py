"""`headrace up --ray ADDRESS`: a server on this machine, its ranks on a Ray cluster.

    this machine                            Ray cluster (a placement group, a bundle for each rank)
    ┌───────────────────────────┐           ┌──────────────┐  ┌──────────────┐
    │ headrace serve            │◄──orders──┤ rank 0       │──│ rank 1       │ …   headrace stage
    │   --stages external       │           │              │  │              │
    │ headrace up ──────────────┼─run, stop─► Ray worker   │  │ Ray worker   │
    └───────────────────────────┘           └──────────────┘  └──────────────┘

A rank that ends takes its group along, as everywhere; all ranks are then started again, those of a lost node on another
one. Ray places and watches; the ranks talk to the server and to each other as without it.
"""

import asyncio
import hashlib
import logging
import secrets
import signal
from collections.abc import Mapping, Sequence

from headrace.core.config import STAGE_KEY_VARIABLE, Config
from headrace.core.config.stages import GroupConfig
from headrace.core.runtime.logs import configure_logging
from headrace.core.runtime.process import CONFIGURATION_MISTAKE, MISTAKE, module_command
from headrace.core.runtime.rate_limit import Backoff
from headrace.core.runtime.signals import ending, meaningless, signal_name
from headrace.core.types.peers.addresses import host_port
from headrace.server.cluster.options import UpOptions
from headrace.server.cluster.ray_ranks import RayRanks
from headrace.server.launch.free_port import free_port
from headrace.server.stage_group.rank_info import LAUNCHER_VARIABLE, RAY

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # before ranks are started again
STEADY_S = 60.0  # ranks that have run for so long did not fail at their start
GROUP_END_S = 30.0  # for the other ranks, once one has ended


def main(options: UpOptions, config: Config, serve_flags: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a server until a signal. serve_flags: those of `headrace serve`, from which config is. Returns the server's
    exit status. Raises ConfigError for a cluster that cannot be reached or has no room."""
    configure_logging(config.server.log_level, "up", config.server.log_format)
    ranks = RayRanks(options, len(config.scheduler.layout.ranks))
    try:
        return asyncio.run(_Up(ranks, config, serve_flags, environ).run())
    finally:
        ranks.close()


class _Up:
    """One server and the ranks that it has on the cluster."""

    def __init__(self, ranks: RayRanks, config: Config, serve_flags: Sequence[str], environ: Mapping[str, str]) -> None:
        self._ranks = ranks
        self._count = len(config.scheduler.layout.ranks)
        self._serve_flags = serve_flags
        self._host = ranks.own_address if config.group.host == GroupConfig().host else config.group.host
        self._port = config.group.port or free_port()
        key = config.group.key or secrets.token_urlsafe(32)
        self._environment = {**environ, STAGE_KEY_VARIABLE: key}
        self._key = key
        self._server: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        log.info("placing %d ranks on the cluster", self._count)
        await self._ranks.place()
        self._server = await asyncio.create_subprocess_exec(
            *module_command("headrace.cli.commands", "serve", *self._serve_flags),
            "--stages", "external", "--stage-host", self._host, "--stage-port", str(self._port),
            stdin=asyncio.subprocess.DEVNULL, env=self._environment, start_new_session=True,
        )  # fmt: skip
        for number in ending():
            loop.add_signal_handler(number, self._signalled, number)
        for other in meaningless():
            loop.add_signal_handler(other, log.info, "%s changes nothing here", signal_name(other))
        serving = asyncio.create_task(self._server.wait())
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():  # the ranks cannot run, or the cluster has no room for them any more
                self._server.terminate()
            status = await serving
            return watching.result() if watching.done() else status
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._ranks.stop()

    async def _watch(self) -> int:
        """Run the ranks, and start them again when they end. Returns the exit status of ranks that cannot run."""
        backoff, loop = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), asyncio.get_running_loop()
        while True:
            started = loop.time()
            statuses = await self._run_once()
            if CONFIGURATION_MISTAKE in statuses:
                log.error("a rank cannot run with this configuration, see above")
                return MISTAKE
            if loop.time() - started > STEADY_S:
                backoff.reset()
            pause_s = backoff.next_delay()
            log.error("the ranks have ended (exit statuses %s); starting them again in %g s", statuses, pause_s)
            await asyncio.sleep(pause_s)
            await self._ranks.place()

    async def _run_once(self) -> list[int]:
        """Run every rank until all have ended. Returns their exit statuses."""
        nodes = self._ranks.nodes()
        log.info("ranks on %s", ", ".join(nodes))
        master = host_port(nodes[0], await self._ranks.free_port(0))
        running = [
            asyncio.create_task(self._run_rank(rank, self._arguments(node, master), self._variables(rank, nodes)))
            for rank, node in enumerate(nodes)
        ]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(running, timeout=GROUP_END_S)
        await self._ranks.stop()
        return list(await asyncio.gather(*running))

    async def _run_rank(self, rank: int, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        """The key goes to a worker only if it is not there: everybody who may use the cluster can read what is sent."""
        known = await self._ranks.knows_key(rank, hashlib.sha256(self._key.encode()).hexdigest())
        key = {} if known else {STAGE_KEY_VARIABLE: self._key}
        return await self._ranks.run(rank, arguments, {**variables, **key})

    def _arguments(self, node: str, master: str) -> list[str]:
        scheduler = f"tcp://{host_port(self._host, self._port)}"
        return ["--scheduler", scheduler, "--master", master, "--transfer-host", node]

    def _variables(self, rank: int, nodes: Sequence[str]) -> dict[str, str]:
        """Rank and size of the group, as torchrun sets them. Ray shows each worker its own GPUs only, as device 0."""
        same = [each for each, node in enumerate(nodes) if node == nodes[rank]]
        return {
            LAUNCHER_VARIABLE: RAY,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._count),
            "LOCAL_WORLD_SIZE": str(len(same)),
        }

    def _signalled(self, number: int) -> None:
        """The first signal has the server finish its open requests, the second ends it at once."""
        assert self._server is not None, "handlers are set after it has started"
        log.info("%s: draining the server; a second signal ends open requests at once", signal_name(number))
        if self._server.returncode is None:
            self._server.send_signal(signal.SIGTERM)
