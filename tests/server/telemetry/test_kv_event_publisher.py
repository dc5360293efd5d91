"""The KV event publisher over real sockets: events decoded as by vLLM's clients, and replays."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import msgspec
import pytest
import zmq

from headrace.core.config import KvEventsConfig
from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, ReplicaKvEvent
from headrace.core.types.errors import ConfigError
from headrace.server.launch.free_port import free_port
from headrace.server.telemetry.kv_event_publisher import (
    MAX_TOPICS,
    RETRY_S,
    SILENCE_S,
    KvEventPublisher,
    publisher_endpoint,
)

Socket = zmq.Socket[bytes]

PATIENCE_S = 60.0  # with a replay, on a machine whose cores are shared


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Batches as vLLM 0.32 declares them; the events are maps."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Network(zmq.Context[Socket]):
    """A context that keeps its sockets until the end of the test, and closes them."""

    opened: ClassVar[list[Socket]] = []

    def socket(self, *args: Any, **more: Any) -> Socket:
        self.opened.append(super().socket(*args, **more))
        return self.opened[-1]


@pytest.fixture
def context() -> Iterator["zmq.Context[Socket]"]:
    context = Network()
    yield context
    while Network.opened:
        Network.opened.pop().close(linger=0)
    context.term()


def make(context: "zmq.Context[Socket]", **changes: Any) -> tuple[KvEventPublisher, KvEventsConfig]:
    config = KvEventsConfig(port=free_port(), replay_port=free_port(), **changes)
    return KvEventPublisher(config, context, wall=lambda: 1.5), config


def publish(publisher: KvEventPublisher, number: int) -> None:
    """A batch that differs from the others."""
    publisher.apply(BlockRemoved(block_hashes=(number,)), 0.0)
    assert publisher.next_deadline() == 0.0
    publisher.tick(0.0)


def subscribed(
    context: "zmq.Context[Socket]", publisher: KvEventPublisher, config: KvEventsConfig, topic: str = ""
) -> Socket:
    """A subscriber that is connected, so that it gets what is published from now on."""
    sub = context.socket(zmq.SUB)
    sub.rcvtimeo = 10_000
    sub.linger = 0
    sub.subscribe(topic.encode())
    sub.connect(publisher_endpoint(config.host, config.port))
    while not sub.poll(20):
        publish(publisher, 0)
    while sub.poll(100):
        sub.recv_multipart()
    return sub


def replay(socket: Socket, publisher: KvEventPublisher, start: int) -> list[tuple[int, bytes]]:
    """Request a replay from this sequence on."""
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    return answers(socket, publisher)


def answers(socket: Socket, publisher: KvEventPublisher) -> list[tuple[int, bytes]]:
    """Answers to a replay request, until its end."""
    found = []
    router = publisher.sockets()[0]
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if router.poll(0 if publisher.next_deadline() is not None else 5):
            publisher.receive(0.0)
        publisher.tick(0.0)
        wait_ms = 1  # gives way to the thread that carries the batches
        while socket.poll(wait_ms):
            wait_ms = 0
            delimiter, topic, sequence, payload = socket.recv_multipart()
            assert delimiter == b""
            number = int.from_bytes(sequence, "big", signed=True)
            if number == -1:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((number, payload))
    raise AssertionError(f"no end of the replay after {len(found)} batches")


def dealer(context: "zmq.Context[Socket]", config: KvEventsConfig, **options: int) -> Socket:
    asking = context.socket(zmq.DEALER)
    asking.linger = 0
    for name, setting in options.items():
        setattr(asking, name, setting)
    asking.connect(publisher_endpoint(config.host, config.replay_port))
    return asking


def counted(publisher: KvEventPublisher) -> Callable[..., float]:
    values = {(sample.name, *sample.labels): sample.value for sample in publisher.statistics().samples}
    return lambda *name: values.get(name, 0.0)


def test_each_replica_has_batches_of_its_own(context: "zmq.Context[Socket]") -> None:
    publisher, config = make(context, topic="kv")
    sub = subscribed(context, publisher, config, "kv")
    for number in range(4):
        event = BlockRemoved(block_hashes=(number,))
        publisher.apply(ReplicaKvEvent(replica=1, event=event) if number % 2 else event, 0.0)
    publisher.tick(0.0)
    batches = [msgspec.msgpack.decode(sub.recv_multipart()[2], type=Batch) for _ in range(2)]
    assert [batch.data_parallel_rank for batch in batches] == [0, 1]
    found = [[event["block_hashes"] for event in batch.events] for batch in batches]
    assert found == [[[0], [2]], [[1], [3]]]


def test_the_bytes_are_those_of_vllm(context: "zmq.Context[Socket]") -> None:
    publisher, config = make(context, topic="kv@here")
    sub = subscribed(context, publisher, config, "kv@")
    publisher.apply(
        BlockStored(block_hashes=(2**64 - 1, 5), parent_block_hash=7, token_ids=(1, 2, 3, 4), block_size=2), 0.0
    )
    publisher.apply(BlockRemoved(block_hashes=(5,)), 0.0)
    publisher.apply(AllBlocksCleared(), 0.0)
    publisher.tick(0.0)
    topic, sequence, payload = sub.recv_multipart()
    assert topic == b"kv@here"
    assert len(sequence) == 8
    batch = msgspec.msgpack.decode(payload, type=Batch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    assert batch.events == [
        {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1, 5],
            "parent_block_hash": 7,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]
    assert msgspec.msgpack.decode(payload)[0] == 1.5, "the batch itself is an array"
    assert payload.hex().startswith("93cb3ff80000000000009388a474797065ab426c6f636b53746f726564")
    value = counted(publisher)
    assert value("kv_events_published_total", "stored") == value("kv_events_published_total", "cleared") == 1
    assert value("kv_event_blocks_total", "stored") == 2
    publisher.close()


def test_a_late_subscriber_catches_up_without_gap_or_duplicate(context: "zmq.Context[Socket]") -> None:
    publisher, config = make(context)
    for number in range(1000):
        publish(publisher, number)
    sub = subscribed(context, publisher, config)
    asking = dealer(context, config)
    publish(publisher, 1)
    live = int.from_bytes(sub.recv_multipart()[1], "big")
    asking.send_multipart([b"", bytes(8)])
    assert publisher.sockets()[0].poll(5000)
    publisher.receive(0.0)
    for number in range(500):  # publishing goes on during a replay
        publish(publisher, number)
    heard = answers(asking, publisher)
    replayed = [number for number, _ in heard]
    assert replayed == list(range(len(heard)))
    assert len(heard) > live
    newest = [int.from_bytes(sub.recv_multipart()[1], "big") for _ in range(500)]
    assert [*replayed, *(number for number in newest if number > replayed[-1])] == list(range(live + 501))
    assert msgspec.msgpack.decode(heard[42][1])[1] == [{"type": "BlockRemoved", "block_hashes": [42], "medium": "GPU"}]
    assert replay(asking, publisher, live + 500)[0][0] == live + 500
    assert replay(asking, publisher, live + 501) == replay(asking, publisher, 2**63) == []
    publisher.close()


def test_the_oldest_batches_are_dropped(context: "zmq.Context[Socket]") -> None:
    publisher, config = make(context, buffer=10)
    for number in range(25):
        publish(publisher, number)
    assert [number for number, _ in replay(dealer(context, config), publisher, 3)] == list(range(15, 25))
    publisher.close()


def test_a_subscriber_that_does_not_read_is_left_behind(context: "zmq.Context[Socket]") -> None:
    """Publishing goes on, memory is bounded, and what it missed can be replayed."""
    publisher, config = make(context, buffer=4000)
    sub = context.socket(zmq.SUB)
    sub.rcvhwm = 1
    sub.linger = 0
    sub.subscribe(b"")
    sub.connect(publisher_endpoint(config.host, config.port))
    while not sub.poll(20):
        publish(publisher, 0)
    first = int.from_bytes(sub.recv_multipart()[1], "big")
    filler = tuple(range(2**63, 2**63 + 500))
    for _ in range(12_000):
        publisher.apply(BlockRemoved(block_hashes=filler), 0.0)
        publisher.tick(0.0)
    got = []
    while sub.poll(300):
        got.append(int.from_bytes(sub.recv_multipart()[1], "big"))
    assert got == sorted(set(got))
    assert len(got) < 12_000, "some were dropped"
    again = [number for number, _ in replay(dealer(context, config), publisher, first + 1)]
    assert len(again) == 4000
    assert again[-1] - again[0] == 3999
    publisher.close()


def test_subscribers_that_send_garbage_or_do_not_read_affect_no_other(context: "zmq.Context[Socket]") -> None:
    publisher, config = make(context, buffer=300)
    for number in range(300):
        publish(publisher, number)
    bad, deaf, good = (dealer(context, config) for _ in range(3))
    for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""]):
        bad.send_multipart(frames)
    for _ in range(500):
        deaf.send_multipart([b"", bytes(8)])
    bad.send_multipart([b"", bytes(2000)])  # too long: the connection ends
    assert [number for number, _ in replay(good, publisher, 0)] == list(range(300))
    for _ in range(10):
        while publisher.sockets()[0].poll(20):
            publisher.receive(0.0)
        while publisher.next_deadline() is not None:
            publisher.tick(0.0)
    assert counted(publisher)("malformed_frames_total", "kv_events_replay") == 4
    assert [number for number, _ in replay(good, publisher, 200)] == list(range(200, 300))
    publisher.close()


def test_a_subscriber_that_reads_nothing_of_its_replay_is_cut_off_and_others_are_served(
    context: "zmq.Context[Socket]",
) -> None:
    publisher, config = make(context, buffer=4000)
    filler = tuple(range(2**63, 2**63 + 2000))  # 18 kB a batch: all of them are far more than kernels take in
    for _ in range(4000):
        publisher.apply(BlockRemoved(block_hashes=filler), 0.0)
        publisher.tick(0.0)
    deaf = dealer(context, config, rcvhwm=1, rcvbuf=4096)
    deaf.send_multipart([b"", bytes(8)])
    assert publisher.sockets()[0].poll(5000)
    publisher.receive(0.0)
    sent = counted(publisher)
    before = -1.0
    while counted(publisher)("kv_event_batches_replayed_total") != before:
        before = counted(publisher)("kv_event_batches_replayed_total")
        for _ in range(10):
            publisher.tick(0.0)
        deaf.poll(20)
    assert before < 4000
    assert publisher.next_deadline() == RETRY_S, "it is tried again, without haste"
    assert len(replay(dealer(context, config), publisher, 0)) == 4000
    for now in (SILENCE_S - 0.1, SILENCE_S + 0.1):
        assert sent("connections_closed_total", "kv_events_replay", "unread") == 0
        publisher.tick(now)
    assert counted(publisher)("connections_closed_total", "kv_events_replay", "unread") == 1
    assert publisher.next_deadline() is None
    publisher.close()


def test_a_subscriber_to_ever_more_topics_is_cut_off(context: "zmq.Context[Socket]") -> None:
    publisher, config = make(context)
    sub = subscribed(context, publisher, config)
    greedy = context.socket(zmq.SUB)
    greedy.linger, greedy.reconnect_ivl = 0, -1
    greedy.connect(publisher_endpoint(config.host, config.port))
    for number in range(10 * MAX_TOPICS):
        greedy.subscribe(f"topic {number}")
    while counted(publisher)("connections_closed_total", "kv_events", "refused") == 0:
        publish(publisher, 1)
        publisher.receive(0.0)
    publish(publisher, 2)
    while msgspec.msgpack.decode(sub.recv_multipart()[2])[1][0]["block_hashes"] != [2]:
        pass
    publisher.close()


def test_what_is_left_goes_out_at_the_end(context: "zmq.Context[Socket]") -> None:
    publisher, config = make(context)
    sub = subscribed(context, publisher, config)
    publisher.apply(AllBlocksCleared(), 0.0)
    publisher.close()
    assert msgspec.msgpack.decode(sub.recv_multipart()[2])[1] == [{"type": "AllBlocksCleared"}]


def test_a_port_that_is_taken_is_named(context: "zmq.Context[Socket]") -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for config in (KvEventsConfig(port=port), KvEventsConfig(port=free_port(), replay_port=port)):
            with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
                KvEventPublisher(config, context)


def test_addresses() -> None:
    assert publisher_endpoint("127.0.0.1", 5) == "tcp://127.0.0.1:5"
    assert publisher_endpoint("0.0.0.0", 5) == publisher_endpoint("::", 5) == "tcp://*:5"
    assert publisher_endpoint("::1", 5) == "tcp://[::1]:5"


def test_llm_ds_index_reads_pod_model_and_hashes(context: "zmq.Context[Socket]") -> None:
    """Its subscribers filter by kv@, take pod and model from the topic, and the last 8 bytes of a hash (llm-d-router at
    ebab6879, pkg/kvevents/pool.go and engineadapter/common.go, vllm_adapter.go: events as maps)."""
    topic = "kv@10.0.0.7:8000@HuggingFaceTB/SmolLM2-135M"
    publisher, config = make(context, topic=topic)
    sub = subscribed(context, publisher, config, "kv@")
    hashes = (7, (1 << 63) + 5)
    publisher.apply(BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=(1, 2, 3, 4), block_size=2), 0.0)
    publisher.tick(0.0)
    heard, _, payload = sub.recv_multipart()
    publisher.close()
    _kv, pod, model = heard.decode().split("@")
    assert (pod, model) == ("10.0.0.7:8000", "HuggingFaceTB/SmolLM2-135M")
    (event,) = msgspec.msgpack.decode(payload, type=Batch).events
    assert event["type"] == "BlockStored"
    assert tuple(event["block_hashes"]) == hashes, "whole numbers of 64 bits, as its index keeps them"
    assert (event["token_ids"], event["block_size"]) == ([1, 2, 3, 4], 2)
    assert event.get("parent_block_hash") is None
