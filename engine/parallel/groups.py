"""Process groups of the ranks of a server (torch.distributed, NCCL or Gloo).

    world    all ranks: hidden states, point to point
    tp       the shards of one stage: all-reduces and gathers of sharded layers
    dp       the same shard of one stage in all replicas: exchange of tokens between experts by all-gather
    ep       all ranks of one stage, of all replicas: exchange of tokens between experts by all-to-all
    second   dp and ep once more, for the second halves of passes that are cut (dual-batch overlap)
    tokens   all ranks of one replica: sampled tokens, over a communicator of their own

Creating a group is a collective operation of all ranks, its members or not: every rank creates all groups of all kinds,
in the same order, before it computes anything.
"""

import ipaddress
import socket
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # public in torch.distributed, but typed here only

from headrace.core.config import StageConfig
from headrace.core.types.layout import Layout
from headrace.engine.collectives.alone import Alone
from headrace.engine.collectives.base import Collectives
from headrace.engine.collectives.link import LinkBroken
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group


class Groups(NamedTuple):
    """The groups that one rank is a member of."""

    tp: Collectives = Alone()
    """The shards of its stage and replica."""
    dp: Collectives = Alone()
    """The same shard of its stage in all replicas, where they share experts."""
    ep: Collectives = Alone()
    """All ranks of its stage, where they share experts."""
    second_dp: Collectives = Alone()
    second_ep: Collectives = Alone()
    """The same for the second halves of passes, where passes are cut."""
    tokens: dist.ProcessGroup | None = None
    """The ranks of its replica; None where it is the only one."""


def join_groups(config: StageConfig, device: torch.device) -> Groups:
    """Form the world and all groups of it. With a single rank there are none, and nothing is done.

    Raises LinkBroken when a rank is missing or the rendezvous cannot be reached.
    """
    if len(config.layout.ranks) == 1:
        return Groups()
    _join_world(config, device)
    engine = config.engine
    return make_groups(
        config.layout, config.rank, config.stage_timeout_s, experts=engine.expert_parallel, overlap=engine.overlap
    )


def make_groups(layout: Layout, rank: int, timeout_s: float, *, experts: bool = False, overlap: bool = False) -> Groups:
    """Create all groups of a layout within the world; returns those of this rank.

    timeout_s: of one operation. experts: the ranks of a stage share experts. overlap: passes may be cut in halves.
    Raises LinkBroken when a rank is gone.
    """
    groups = Groups()
    for first in layout.ranks[:: layout.tp] if layout.tp > 1 else ():
        made = make_group(layout.shards(first), timeout_s)
        if rank in layout.shards(first):
            groups = groups._replace(tp=TorchCollectives(made))
    if experts:
        dp, ep = _expert_groups(layout, rank, timeout_s)
        groups = groups._replace(dp=dp, ep=ep)
    if experts and overlap:
        dp, ep = _expert_groups(layout, rank, timeout_s)
        groups = groups._replace(second_dp=dp, second_ep=ep)
    for replica in range(layout.dp):
        members = layout.replica_ranks(replica)
        if len(members) > 1:
            made = make_group(members, timeout_s)
            if rank in members:
                groups = groups._replace(tokens=made)
    return groups


def _expert_groups(layout: Layout, rank: int, timeout_s: float) -> tuple[Collectives, Collectives]:
    """Create the dp and ep groups of all stages. Returns those of this rank."""
    dp: Collectives = Alone()
    ep: Collectives = Alone()
    for stage in range(layout.pp):
        for shard in range(layout.tp if layout.dp > 1 else 0):
            members = layout.across_replicas(layout.rank(stage, 0, shard))
            made = make_group(members, timeout_s)
            if rank in members:
                dp = TorchCollectives(made)
        members = layout.stage_ranks(stage)
        if len(members) > 1:
            made = make_group(members, timeout_s)
            if rank in members:
                ep = TorchCollectives(made)
    return dp, ep


def leave_groups() -> None:
    """Leave the world and all groups, if they were formed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_world(config: StageConfig, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout, size = timedelta(seconds=config.stage_timeout_s), len(config.layout.ranks)
    try:
        # A store that outlives groups (torchrun hosts one) may hold keys of an earlier group: each has its own prefix.
        store = PrefixStore(f"headrace-{config.epoch}-{config.session}", _store(config, size, timeout))
        dist.init_process_group(backend, store=store, rank=config.rank, world_size=size, timeout=timeout)
    except (RuntimeError, OSError) as error:
        raise LinkBroken(f"the group of stages could not be formed: {error}") from error


def _store(config: StageConfig, size: int, timeout: timedelta) -> TCPStore:
    """The rendezvous store at HOST:PORT. Rank 0 opens it, unless a launcher such as torchrun already hosts it."""
    host, _, port = config.rendezvous.rpartition(":")
    host = host.strip("[]")
    opens = config.rank == 0 and not config.rendezvous_hosted
    return TCPStore(
        host, int(port), size, is_master=opens, timeout=timeout, wait_for_workers=False,
        master_listen_fd=_listen(host, int(port)) if opens else None,
    )  # fmt: skip


def _listen(host: str, port: int) -> int | None:
    """A listening socket for the store on this address only; by itself the store would listen on every interface.

    None for a host name: it may resolve to another address on its own machine than on others.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    return socket.create_server((host, port), family=family).detach()
