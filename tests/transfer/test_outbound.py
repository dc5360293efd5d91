"""The sender's books under random orders, answers and lost connections, without a socket."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.geometry import Geometry
from core.orders import AdmitPeer, Send
from transfer.outbound import Outbound, OutChunk, OutSession

GEOMETRY = Geometry("float32", 1, 1, 1, 16)
WINDOW = 250
REQUESTS = st.integers(0, 3)


@dataclass
class Memory:
    """Stands for a frame that libzmq holds."""

    done: bool = False


class OutboundMachine(RuleBasedStateMachine):
    """Two sessions; session 1 never attaches. Request r belongs to session 0 unless it is 3."""

    def __init__(self) -> None:
        super().__init__()
        self.outbound = Outbound()
        self.sessions: list[OutSession] = []
        for name in ("a", "b"):
            self.outbound.admit(AdmitPeer(seq=0, session=name, geometry=GEOMETRY, window_bytes=WINDOW))
            session = self.outbound.session(name)
            assert session is not None
            self.sessions.append(session)
        self.next_chunk = Counter[int]()
        self.held: list[tuple[OutChunk, Memory]] = []
        self.cancelled: set[int] = set()
        self.quiet: Counter[int] = Counter()
        self.acked: Counter[tuple[int, int]] = Counter()
        self.routes = 0

    @rule(request=REQUESTS, size=st.sampled_from([0, 40, 100, 300]))
    def send(self, request: int, size: int) -> None:
        session = self.sessions[request == 3]
        order = Send(
            after=0,
            seq=0, request=request, session=session.session, ticket=str(request), generation=1,
            chunk=self.next_chunk[request], start=0, count=0, pages=b"", dst_pages=b"", row=0, dst_row=0,
        )  # fmt: skip
        self.next_chunk[request] += 1
        self.outbound.enqueue(session, order, size, b"")

    @rule()
    def attach(self) -> None:
        self.routes += 1
        self.outbound.attach(self.sessions[0], bytes([self.routes % 250]))

    @precondition(lambda self: self.sessions[0].route is not None)
    @rule()
    def lose_connection(self) -> None:
        self.outbound.detach(self.sessions[0])

    @rule()
    def pump(self) -> None:
        for session in self.sessions:
            while (chunk := self.outbound.next_chunk(session)) is not None:
                assert chunk.order.request not in self.cancelled
                memory = Memory()
                chunk.handles.append(memory)
                self.held.append((chunk, memory))

    @precondition(lambda self: any(s.in_flight for s in self.sessions))
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        session = self.sessions[0]
        key = data.draw(st.sampled_from(sorted(session.in_flight)))
        chunk = self.outbound.answered(session, key)
        assert chunk is not None
        self.outbound.acked(chunk)
        assert self.outbound.answered(session, key) is None

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
        acked, quiet = self.outbound.settle()
        for chunk in acked:
            assert all(memory.done for other, memory in self.held if other is chunk), "acknowledged but still held"
            assert chunk.order.request not in self.cancelled
            self.acked[chunk.order.request, chunk.order.chunk] += 1
        for request in quiet:
            assert all(
                memory.done
                for other, memory in self.held
                if other.order.request == request and not self.acked[request, other.order.chunk]
            ), "quiet but still held"
            self.quiet[request] += 1

    @invariant()
    def books_balance(self) -> None:
        for session in self.sessions:
            in_flight = [chunk.wire_bytes for chunk in session.in_flight.values()]
            assert session.unacked_bytes == sum(in_flight)
            assert session.unacked_bytes <= WINDOW or len([size for size in in_flight if size]) == 1
            assert all(chunk.owner.open for chunk in session.queue)
        assert all(count == 1 for count in [*self.quiet.values(), *self.acked.values()])
        assert set(self.quiet) <= self.cancelled
        assert self.sessions[1].route is None
        assert not self.sessions[1].in_flight

    def teardown(self) -> None:
        """Everything ends once connections and memory are well."""
        self.attach()
        for _ in range(500):
            self.pump()
            for _, memory in self.held:
                memory.done = True
            for key in list(self.sessions[0].in_flight):
                chunk = self.outbound.answered(self.sessions[0], key)
                if chunk is not None:
                    self.outbound.acked(chunk)
            self.settle()
            if not self.sessions[0].queue and not self.outbound.unsettled:
                break
        assert not self.sessions[0].queue
        assert set(self.quiet) == self.cancelled
        for request in range(3):
            if request not in self.cancelled:
                chunks = {chunk for owner, chunk in self.acked if owner == request}
                assert chunks == set(range(self.next_chunk[request]))


TestOutbound = OutboundMachine.TestCase
