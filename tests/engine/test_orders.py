"""Streams of orders to replicas, as the scheduler process and each rank count and hash them."""

import random
from collections.abc import Callable

import pytest

from headrace.core.messages.orders import AnyOrder, BeginEpoch, DropPeer, Forward, PlanRow, ReleaseRequest
from headrace.core.runtime.codec import Codec
from headrace.core.types.ranks.coordinate import Agreement
from headrace.engine.orders import OrderCheck, OrderMismatch
from headrace.server.launch.stage_channel import ReplicaStreams

ORDERS: Codec[AnyOrder] = Codec(AnyOrder)
ALL = (0, 1)
Sent = list[tuple[tuple[int, ...], AnyOrder]]


def rows(count: int) -> tuple[PlanRow, ...]:
    return (PlanRow(1, 0, count, b"\0" * 4, b"\0" * 4 * count),) if count else ()


def lockstep(seed: int, passes: int = 6) -> Sent:
    """Orders to all ranks, to one replica, and passes; numbers are the server's, so each replica sees gaps."""
    rng = random.Random(seed)
    sent: Sent = [(ALL, BeginEpoch(seq=1, epoch=0))]
    seq = 1
    for _ in range(passes):
        seq += 1
        tokens = (rng.randrange(3), rng.randrange(1, 3))
        sent += [
            ((replica,), Forward(seq=seq, rows=rows(tokens[replica]), agreement=Agreement(tokens))) for replica in ALL
        ]
        seq += 1
        sent.append(((rng.choice(ALL),), ReleaseRequest(seq=seq, request=seq)))
        seq += 1
        sent.append((ALL, DropPeer(seq=seq, session="s")))
    return sent


def streams_of(sent: Sent) -> ReplicaStreams:
    streams = ReplicaStreams(2)
    for replicas, order in sent:
        streams.add(replicas, ORDERS.encode(order), order)
    return streams


def rank_of(replica: int, orders: list[AnyOrder]) -> OrderCheck:
    check = OrderCheck(replica)
    for order in orders:
        frame = ORDERS.encode(order)
        check.add(frame, ORDERS.decode(frame))
    return check


def to(replica: int, sent: Sent) -> list[AnyOrder]:
    return [order for replicas, order in sent if replica in replicas]


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_agrees(seed: int) -> None:
    """S6: work orders reach the ranks of their replica, all others every rank."""
    sent = lockstep(seed)
    streams = streams_of(sent)
    assert streams.orders == len(sent)
    heartbeats = [streams.heartbeat(replica) for replica in ALL]
    for replica in ALL:
        rank_of(replica, to(replica, sent)).check(heartbeats[replica])
    assert (heartbeats[0].passes, heartbeats[0].pass_digest) == (heartbeats[1].passes, heartbeats[1].pass_digest)
    assert heartbeats[0].passes == 6


def dropped(orders: list[AnyOrder]) -> list[AnyOrder]:
    return [*orders[:4], *orders[5:]]


def swapped(orders: list[AnyOrder]) -> list[AnyOrder]:
    return [*orders[:3], orders[4], orders[3], *orders[5:]]


def repeated(orders: list[AnyOrder]) -> list[AnyOrder]:
    return [*orders[:3], orders[3], *orders[3:]]


def altered(orders: list[AnyOrder]) -> list[AnyOrder]:
    return [*orders[:-1], DropPeer(seq=orders[-1].seq, session="another")]


@pytest.mark.parametrize("damage", [dropped, swapped, repeated, altered])
@pytest.mark.parametrize("replica", ALL)
def test_damage_for_one_rank_is_found(damage: Callable[[list[AnyOrder]], list[AnyOrder]], replica: int) -> None:
    sent = lockstep(1)
    streams = streams_of(sent)
    damaged = rank_of(replica, damage(to(replica, sent)))
    with pytest.raises(OrderMismatch, match="orders are not the scheduler's"):
        damaged.check(streams.heartbeat(replica))
    rank_of(1 - replica, to(1 - replica, sent)).check(streams.heartbeat(1 - replica))


def test_replicas_that_were_told_different_agreements() -> None:
    """V4: each has what it was sent, and the passes are not the same: the second replica's ranks fail."""
    sent = lockstep(2)
    index = max(
        index for index, (replicas, order) in enumerate(sent) if replicas == (1,) and isinstance(order, Forward)
    )
    order = sent[index][1]
    assert isinstance(order, Forward)
    assert order.agreement is not None
    other = Agreement(order.agreement.tokens, padded=8)
    sent[index] = ((1,), Forward(seq=order.seq, rows=order.rows, agreement=other))
    streams = streams_of(sent)
    rank_of(0, to(0, sent)).check(streams.heartbeat(0))
    with pytest.raises(OrderMismatch, match="passes are not those of all replicas"):
        rank_of(1, to(1, sent)).check(streams.heartbeat(1))


@pytest.mark.parametrize(("replica", "count"), [(0, 4), (1, 0), (2, 3)])
def test_rows_that_contradict_the_agreement_are_not_computed(replica: int, count: int) -> None:
    """The order is refused when it comes, before it is handed to the compute thread."""
    order = Forward(seq=2, rows=rows(count), agreement=Agreement((3, 1)))
    with pytest.raises(OrderMismatch, match=rf"{count} tokens of replica {replica}; agreed are \(3, 1\)"):
        rank_of(replica, [order])


def test_without_lockstep_there_are_no_passes() -> None:
    """V1: the heartbeat is encoded as ever."""
    sent: Sent = [((0,), BeginEpoch(seq=1, epoch=0)), ((0,), Forward(seq=2, rows=rows(2)))]
    streams = ReplicaStreams(1)
    for replicas, order in sent:
        streams.add(replicas, ORDERS.encode(order), order)
    heartbeat = streams.heartbeat(0)
    assert (heartbeat.passes, heartbeat.pass_digest) == (0, b"")
    assert b"pass" not in ORDERS.encode(heartbeat)
    rank_of(0, to(0, sent)).check(heartbeat)
