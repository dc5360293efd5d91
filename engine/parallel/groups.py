"""Process groups of the ranks of a server (torch.distributed, NCCL or Gloo).

    world    all ranks: hidden states, point to point
    tp       the shards of one stage: all-reduces and gathers of sharded layers, through shared memory if all are on the
             CPU of one machine
    dp       the same shard of one stage in all replicas: exchange of tokens between experts by all-gather
    ep       all ranks of one stage, of all replicas: exchange of tokens between experts by all-to-all
    second   dp and ep once more, for the second halves of passes that are cut (dual-batch overlap)
    tokens   all ranks of one replica: sampled tokens, over a communicator of their own
    votes    the first shards of servers with a scheduler each that share experts: what they agree on
    told     the shards of one such server: the first tells the others, on the hosts
    loaded   all ranks of such servers: those that have loaded wait for the others, longer than for a pass

Servers that share experts (--dp-external) are the replicas of one world.

Creating a group is a collective operation of all ranks, its members or not: every rank creates all groups of all kinds,
in the same order, before it computes anything.
"""

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # public in torch.distributed, but typed here only

from headrace.core.config import StageConfig
from headrace.core.types.ranks.layout import Layout
from headrace.engine.collectives.operations import Alone, Collectives, LinkBroken
from headrace.engine.collectives.shared_memory import on_one_machine
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.engine.parallel.meeting import FORMING_S, common_terms, listen, meet

LOADING_S = 3600.0  # longest time by which a server that shares experts may load later than another one


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
    votes: Collectives | None = None
    """The ranks that vote, of all servers that share experts; None where this one does not vote."""
    told: Collectives | None = None
    """The shards of its server, where servers share experts and have several."""
    loaded: Collectives | None = None
    """All ranks of all servers that share experts, on the hosts, for waits as long as loading takes."""


def join_groups(config: StageConfig, device: torch.device) -> Groups:
    """Form the world and all groups of it. With a single rank there are none, and nothing is done.

    Servers that share experts meet first, and wait for one another without end. Raises LinkBroken when a rank is
    missing or the rendezvous cannot be reached, ConfigError for a server that does not fit the others.
    """
    layout, rank = config.shared_layout, config.shared_rank
    if len(layout.ranks) == 1:
        return Groups()
    _join_world(config, device)
    engine = config.engine
    groups = make_groups(layout, rank, config.stage_timeout_s, experts=engine.expert_parallel, overlap=engine.overlap)
    if layout.tp > 1 and device.type == "cpu":
        groups = groups._replace(tp=on_one_machine(groups.tp, config.stage_timeout_s))
    return groups if config.member is None else _add_vote_groups(groups, config)


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


def _add_vote_groups(groups: Groups, config: StageConfig) -> Groups:
    """Create the groups in which servers that share experts agree, and add those of this rank."""
    layout, rank, timeout_s = config.shared_layout, config.shared_rank, config.stage_timeout_s
    voting = layout.across_replicas(0)
    groups = groups._replace(loaded=TorchCollectives(make_group(layout.ranks, LOADING_S, "gloo")))
    made = make_group(voting, timeout_s, "gloo" if config.dp_sync == "cpu" else None)
    if rank in voting:
        groups = groups._replace(votes=TorchCollectives(made))
    for first in voting if layout.tp > 1 else ():
        made = make_group(layout.shards(first), timeout_s, "gloo")
        if rank in layout.shards(first):
            groups = groups._replace(told=TorchCollectives(made))
    return groups


def leave_groups() -> None:
    """Leave the world and all groups, if they were formed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_world(config: StageConfig, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    rank, size = config.shared_rank, len(config.shared_layout.ranks)
    timeout = timedelta(seconds=config.stage_timeout_s)
    try:
        if config.member is not None:
            store, timeout = meet(config, common_terms(config)), timedelta(seconds=FORMING_S)
        else:
            # A store that outlives groups (torchrun hosts one) may hold keys of an earlier group: each has its own
            # prefix.
            store = PrefixStore(f"headrace-{config.epoch}-{config.session}", _store(config, size, timeout))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, OSError) as error:
        raise LinkBroken(f"the group of stages could not be formed: {error}") from error


def _store(config: StageConfig, size: int, timeout: timedelta) -> TCPStore:
    """The rendezvous store at HOST:PORT. Rank 0 opens it, unless a launcher such as torchrun already hosts it."""
    host, _, port = config.rendezvous.rpartition(":")
    host = host.strip("[]")
    opens = config.rank == 0 and not config.rendezvous_hosted
    return TCPStore(
        host, int(port), size, is_master=opens, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listen(host, int(port)) if opens else None,
    )  # fmt: skip
