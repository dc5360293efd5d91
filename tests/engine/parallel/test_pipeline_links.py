"""PipelineLinks alone: what is sent, waited for and dropped, and in which order."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
import torch

from headrace.core.messages.orders import Forward, PlanRow
from headrace.core.types.packed import pack
from headrace.core.types.ranks.layout import Layout
from headrace.engine.collectives.operations import LinkBroken
from headrace.engine.parallel.pipeline import PipelineLinks
from headrace.engine.row_sampler import PLACEHOLDER, FedTokens, Sampling
from headrace.engine.runner import HiddenSpec
from headrace.engine.sampling.sampler import NO_TOKEN
from tests.engine.parallel.thread_world import World

SPEC = HiddenSpec(2, torch.float32, torch.device("cpu"))
THREE = Layout(3, 1, 1)
CREDITS = 4
TIMEOUT_S = 120.0


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with patch("headrace.engine.parallel.carriers.dist", made):
        yield made


class Rank:
    """The links of one rank, called by this thread in its name."""

    def __init__(self, world: World, rank: int, layout: Layout = THREE) -> None:
        self._world, self._rank = world, rank
        self._links = PipelineLinks(layout, rank, SPEC, "tokens", CREDITS)  # type: ignore[arg-type]

    @property
    def links(self) -> PipelineLinks:
        self._world.enter(self._rank)
        return self._links


def plan(seq: int, *requests: int, feeds: bool = True, count: int = 1) -> Forward:
    rows = tuple(PlanRow(request, 0, count, pack([0]), pack([7] * count), feeds=feeds) for request in requests)
    return Forward(seq=seq, rows=rows)


def taking(*requests: int) -> list[PlanRow]:
    """Rows that take the token that was sampled last for their requests."""
    return [PlanRow(request, 1, 1, pack([0])) for request in requests]


def sampled(*pairs: tuple[int, int]) -> Sampling:
    places = {request: place for place, (request, _) in enumerate(pairs)}
    return Sampling(FedTokens(places, torch.tensor([token for _, token in pairs])), lambda _sampling: None)


def taken(links: PipelineLinks, *requests: int) -> list[tuple[int, int]]:
    """Tokens that rows of these requests get, and those before them."""
    return [
        (each, int(fed.tokens[at])) for fed in links.tokens_for(taking(*requests)) for each, at in fed.places.items()
    ]


def broadcast(ranks: Sequence[Rank], seq: int, requests: Sequence[int], *pairs: tuple[int, int]) -> None:
    """One plan's tokens: the last rank has sampled them."""
    drawn = sampled(*((request, dict(pairs).get(request, NO_TOKEN)) for request in requests))
    for rank in reversed(ranks):
        rank.links.broadcast(plan(seq, *requests), drawn if rank is ranks[-1] else None)


@pytest.fixture
def ranks(world: World) -> list[Rank]:
    return [Rank(world, number) for number in range(3)]


def test_hidden_states_go_to_the_plan_that_they_are_of(ranks: list[Rank]) -> None:
    """Posted ahead, received in another order than sent: the number of the plan decides."""
    one, two = plan(4, 1, count=2), plan(9, 2, 3)
    for each in (one, two):
        ranks[1].links.post_receive(each)
    sent = {each.seq: torch.full((2, 2), float(each.seq)) for each in (one, two)}
    assert ranks[0].links.send(two, sent[9]) == 16
    ranks[0].links.send(one, sent[4])
    for each in (one, two):
        received = ranks[1].links.receive(each)
        assert received is not None
        assert torch.equal(received, sent[each.seq])
    assert ranks[0].links.receive(one) is None, "the first stage gets none"


def test_tokens_come_oldest_first_up_to_the_newest_that_is_needed(ranks: list[Rank]) -> None:
    broadcast(ranks, 1, [10, 11], (10, 100), (11, 110))
    broadcast(ranks, 2, [12], (12, 120))
    broadcast(ranks, 3, [10], (10, 101))
    first = ranks[0].links
    assert first.tokens_for([PlanRow(5, 0, 1, pack([0]), pack([1]))]) == [], (
        "a row with tokens of its own waits for none"
    )
    assert taken(first, 11) == [(10, 100), (11, 110)]
    assert taken(first, 10) == [(12, 120), (10, 101)]
    assert taken(first, 10) == [], "each comes once"


def test_only_ranks_that_embed_and_do_not_sample_take_tokens(ranks: list[Rank]) -> None:
    broadcast(ranks, 1, [10], (10, 100))
    assert [taken(rank.links, 10) for rank in ranks] == [[(10, 100)], [], []]


def test_what_feeds_no_later_row_is_not_broadcast(ranks: list[Rank], world: World) -> None:
    for rank in reversed(ranks):
        rank.links.broadcast(plan(1, 10, feeds=False), sampled((10, 100)) if rank is ranks[-1] else None)
    assert taken(ranks[0].links, 10) == []
    assert not world.has(("tokens", 1))


def test_a_request_without_a_sample_is_fed_a_placeholder(ranks: list[Rank]) -> None:
    """Its row came out NaN: rows that are planned already have to have some token."""
    broadcast(ranks, 1, [10, 11], (11, 110))
    assert taken(ranks[0].links, 10) == [(10, PLACEHOLDER), (11, 110)]


def test_a_request_that_is_released_while_its_token_is_pending_has_none(ranks: list[Rank]) -> None:
    """Others of the same broadcast get theirs; a broadcast of released requests alone is not waited for."""
    broadcast(ranks, 1, [10], (10, 100))
    broadcast(ranks, 2, [10, 11], (10, 101), (11, 110))
    broadcast(ranks, 3, [12], (12, 120))
    first = ranks[0].links
    first.release(10)
    assert taken(first, 11) == [(11, 110)]
    first.release(99)
    assert taken(first, 12) == [(12, 120)]


def test_a_release_before_the_sampler_has_come_to_the_plan_waits_for_nothing(ranks: list[Rank]) -> None:
    """The first stage runs ahead: it has begun its part of the broadcasts, and no token of them exists yet."""
    first = ranks[0].links
    first.broadcast(plan(1, 10), None)
    first.broadcast(plan(2, 11), None)
    first.release(10)
    for seq, request in ((1, 10), (2, 11)):
        ranks[2].links.broadcast(plan(seq, request), sampled((request, 10 * request)))
    assert taken(ranks[0].links, 11) == [(11, 110)], "the first broadcast keeps its turn"


def test_only_plans_in_flight_are_remembered(ranks: list[Rank], world: World) -> None:
    """Operations do not say that they are completed, and each of them keeps its tensor. None is waited for before its
    plan is known to be done: the first stage is as far ahead as it may be."""
    first, middle, last = ranks
    for seq in range(1, 50):
        ahead = plan(seq, seq)
        first.links.send(ahead, torch.zeros(1, 2))
        first.links.broadcast(ahead, [])
        assert max(map(world.kept, range(3))) <= 2 * CREDITS, "sends and broadcasts of the plans in flight"
        if seq < CREDITS:
            continue
        number = seq - CREDITS + 1
        done = plan(number, number)
        for rank in (middle, last):
            rank.links.post_receive(done)
            rank.links.receive(done)
            if rank is middle:
                rank.links.send(done, torch.zeros(1, 2))
        for rank in (last, middle):
            rank.links.broadcast(done, sampled((number, 7)) if rank is last else [])
        assert taken(first.links, number) == [(number, 7)]


def test_a_single_rank_has_nothing_to_send_or_wait_for(world: World) -> None:
    alone = PipelineLinks(Layout(), 0, SPEC, None, CREDITS)
    alone.post_receive(plan(1, 10))
    assert alone.receive(plan(1, 10)) is None
    alone.broadcast(plan(1, 10), sampled((10, 100)))
    assert taken(alone, 10) == []
    alone.release(10)


def test_a_rank_that_leaves_breaks_the_waits_of_the_others(ranks: list[Rank], world: World) -> None:
    one = plan(1, 10)
    ranks[1].links.post_receive(one)
    ranks[0].links.broadcast(one, [])
    world.leave("rank 2 is gone")
    for wait in (lambda: ranks[1].links.receive(one), lambda: ranks[0].links.tokens_for(taking(10))):
        with pytest.raises(LinkBroken):
            wait()


@pytest.mark.full
def test_processes_keep_the_hidden_states_of_plans_in_flight() -> None:
    """Over Gloo itself, with hundreds of hidden states of 1 MiB."""
    stages = 3
    store = socket.create_server(("127.0.0.1", 0))
    port = store.getsockname()[1]
    store.close()
    command = [sys.executable, "-m", "tests.engine.parallel.gloo_rank", str(port), str(stages)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(stages)]
    try:
        failed = [errors for each in ranks if (errors := each.communicate(timeout=TIMEOUT_S)[1]) and each.returncode]
    finally:
        for each in ranks:
            each.kill()
    assert not failed, failed[0]
