"""Per-peer send queues under random orders, answers and lost connections, without a socket."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.messages.orders import SendChunk
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.transfer.data.outbound import Key, Lane, Outbound, OutPart, OutSession

GEOMETRY = Geometry("float32", 3, 1, 1, 16)  # tokens of 24 bytes
HALVES = (Geometry("float32", 2, 1, 1, 16), Geometry("float32", 4, 1, 1, 16, layer_start=2))  # take 16 and 8 of them
WINDOW = 250
REQUESTS = st.integers(0, 3)
LANES = st.integers(0, 1)


@dataclass
class Memory:
    """Stands for a frame that libzmq holds."""

    done: bool = False


class OutboundMachine(RuleBasedStateMachine):
    """Two sessions of two lanes; session 1 never attaches. Request r belongs to session 0 unless it is 3."""

    def __init__(self) -> None:
        super().__init__()
        self.outbound = Outbound(GEOMETRY)
        self.sessions: list[OutSession] = []
        for name in ("a", "b"):
            self.outbound.admit(PeerTerms(session=name, geometries=HALVES, window_bytes=WINDOW))
            session = self.outbound.session(name)
            assert session is not None
            self.sessions.append(session)
        self.lanes = self.sessions[0].lanes
        self.next_chunk = Counter[int]()
        self.held: list[tuple[OutPart, Memory]] = []
        self.answers: Counter[tuple[int, int]] = Counter()
        self.cancelled: set[int] = set()
        self.reported: Counter[int] = Counter()
        self.acked: Counter[tuple[int, int]] = Counter()
        self.routes = 0

    @rule(request=REQUESTS, count=st.sampled_from([0, 2, 5, 20]))
    def send(self, request: int, count: int) -> None:
        session = self.sessions[request == 3]
        order = SendChunk(
            after=0,
            seq=0, request=request, session=session.session, ticket=str(request), generation=1,
            chunk=self.next_chunk[request], start=0, count=count, pages=b"", dst_pages=b"", row=0, dst_row=0,
        )  # fmt: skip
        self.next_chunk[request] += 1
        self.outbound.enqueue(session, order, b"")

    @rule(lane=LANES)
    def attach(self, lane: int) -> None:
        self.routes += 1
        self.outbound.attach(self.lanes[lane], self.routes.to_bytes(4))

    @precondition(lambda self: any(lane.route for lane in self.lanes.values()))
    @rule(data=st.data())
    def a_connection_serves_one_lane(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([lane for lane in self.lanes.values() if lane.route is not None]))
        [other] = [other for other in self.lanes.values() if other is not lane]
        assert lane.route is not None
        self.outbound.attach(other, lane.route)
        assert lane.route is None

    @rule(lane=LANES)
    def lose_connection(self, lane: int) -> None:
        self.outbound.detach(self.lanes[lane])

    @rule()
    def pump(self) -> None:
        for session in self.sessions:
            for lane in session.lanes.values():
                while (part := self.outbound.next_part(lane)) is not None:
                    assert part.owner.request not in self.cancelled
                    memory = Memory()
                    part.handles.append(memory)
                    self.held.append((part, memory))

    @precondition(lambda self: any(lane.in_flight for lane in self.lanes.values()))
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([lane for lane in self.lanes.values() if lane.in_flight]))
        self.answer(lane, data.draw(st.sampled_from(sorted(lane.in_flight))))

    def answer(self, lane: Lane, key: Key) -> None:
        part = self.outbound.answered(lane, key)
        assert part is not None
        self.answers[part.owner.request, part.chunk.order.chunk] += 1
        self.outbound.acked(part)
        assert self.outbound.answered(lane, key) is None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.held))[1].done = True

    @rule(request=REQUESTS)
    def cancel(self, request: int) -> None:
        if request not in self.cancelled:
            self.cancelled.add(request)
            self.outbound.cancel(request)

    @rule()
    def settle(self) -> None:
        acked, cancelled = self.outbound.settle()
        for chunk in acked:
            number = chunk.owner.request, chunk.order.chunk
            assert all(memory.done for part, memory in self.held if part.chunk is chunk), "acknowledged but still held"
            assert chunk.owner.request not in self.cancelled
            assert chunk.bytes == chunk.order.count * GEOMETRY.token_bytes
            assert self.answers[number] == len(HALVES), "acknowledged before every lane was"
            self.acked[number] += 1
        for request in cancelled:
            assert all(
                memory.done
                for part, memory in self.held
                if part.owner.request == request and not self.acked[request, part.chunk.order.chunk]
            ), "reported as cancelled but still held"
            self.reported[request] += 1

    @invariant()
    def windows_and_queues_agree(self) -> None:
        for lane in (lane for session in self.sessions for lane in session.lanes.values()):
            in_flight = [part.wire_bytes for part in lane.in_flight.values()]
            assert lane.unacked_bytes == sum(in_flight)
            assert lane.unacked_bytes <= WINDOW or len([size for size in in_flight if size]) == 1
            assert all(part.owner.open for part in lane.queue)
            assert lane.route is None or self.outbound.lane_at(lane.route) is lane
        assert all(count == 1 for count in [*self.reported.values(), *self.acked.values()])
        assert set(self.reported) <= self.cancelled
        assert not any(lane.route or lane.in_flight for lane in self.sessions[1].lanes.values())

    def teardown(self) -> None:
        """Everything ends once connections and memory are well."""
        self.attach(0)
        self.attach(1)
        for _ in range(500):
            self.pump()
            for _, memory in self.held:
                memory.done = True
            for lane in self.lanes.values():
                for key in list(lane.in_flight):
                    self.answer(lane, key)
            self.settle()
            if not any(lane.queue for lane in self.lanes.values()) and not self.outbound.unsettled:
                break
        assert not any(lane.queue for lane in self.lanes.values())
        assert set(self.reported) == self.cancelled
        for request in range(3):
            if request not in self.cancelled:
                chunks = {chunk for owner, chunk in self.acked if owner == request}
                assert chunks == set(range(self.next_chunk[request]))


TestOutbound = OutboundMachine.TestCase
