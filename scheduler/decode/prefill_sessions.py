"""Sessions with prefill servers: data connections are opened when one is up, and its requests fail when it is not.

Each data-parallel replica has a session of its own, as a reservation's pages are those of one pool.
"""

from headrace.core.messages.frontend import AddPrefill, RemovePrefill
from headrace.core.messages.orders import CloseSession, OpenSession
from headrace.core.messages.peers import ConnectPrefill, DisconnectPrefill, PrefillDown, PrefillUp
from headrace.core.messages.replies import PrefillState
from headrace.core.types.errors import PEER_GONE, ErrorInfo
from headrace.scheduler.admission import no_prefill
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.peers.peer_tables import PrefillPeer
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State


class PrefillSessions:
    """The prefill servers that this server fetches KV from."""

    def __init__(self, state: State, completion: Completion) -> None:
        self._state = state
        self._completion = completion

    def add(self, event: AddPrefill) -> None:
        """Connect to a prefill server's control endpoint."""
        self._state.prefills.add(event.name)
        self._state.out.add(ConnectPrefill(name=event.name, endpoint=event.endpoint, server_key=event.server_key))

    def remove(self, event: RemovePrefill, now: float) -> None:
        """Disconnect from a prefill server, and fail what it has not delivered."""
        server = self._state.prefills.get(event.name)
        if server is None:
            self._state.drop("unknown_prefill")
            return
        for replica in self._state.replicas:
            self._end_session(server, replica, "removed", now)
        self._state.prefills.remove(event.name)
        self._state.out.add(DisconnectPrefill(name=event.name))

    def up(self, event: PrefillUp, now: float) -> None:
        """A session has begun. What was being fetched through the one before it is lost."""
        server = self._state.prefills.get(event.name)
        if server is None:
            self._state.drop("unknown_prefill")
            return
        replica = self._state.replicas[event.replica]
        if server.session(event.replica) is not None:
            self._end_session(server, replica, "a new session began", now)
        server.hellos[event.replica] = event
        server.joined = now
        if self._state.engine.ready:
            self._open_session(event)
        if len(server.hellos) == len(self._state.replicas):
            self._state.out.add(PrefillState(name=event.name, up=True))

    def down(self, event: PrefillDown, now: float) -> None:
        """A session has ended, or a prefill server refused us."""
        server = self._state.prefills.get(event.name)
        if server is None or (event.session is not None and event.session != server.session(event.replica)):
            self._state.drop("unknown_prefill")
            return
        replica = self._state.replicas[event.replica]
        self._end_session(server, replica, event.reason, now, unfit=event.unfit, silent=event.silent)

    def stages_up(self) -> None:
        """Have stages that have just come up open their data connections."""
        for server in self._state.prefills:
            for hello in server.hellos.values():
                self._open_session(hello)

    def _end_session(
        self,
        server: PrefillPeer,
        replica: Replica,
        reason: str,
        now: float,
        *,
        unfit: bool = False,
        silent: bool = False,
    ) -> None:
        """Fail the requests whose KV was to come through the session of a replica, and have its stages close it."""
        state = self._state
        session = server.session(replica.index)
        server.hellos.pop(replica.index, None)
        for request in [one for one in server.requests.values() if one.replica == replica.index]:
            if request.to_fetch:
                self._completion.fail(request, no_prefill(server.name, "down"), now)
            elif request.phase is Phase.FETCHING and request.incoming is not None:
                request.incoming.lose()
                text = f"the prefill server is gone: {reason}"
                error = ErrorInfo(code=PEER_GONE, message=text, status=504 if silent else 502, at_prefill=True)
                self._completion.fail(request, error, now)
        if session is not None and state.engine.ready:
            state.prefills.revoke(session, replica.ranks)
            replica.order(CloseSession(seq=state.out.next_seq(), session=session))
        state.out.add(PrefillState(name=server.name, up=False, reason=reason, unfit=unfit))

    def _open_session(self, hello: PrefillUp) -> None:
        order = OpenSession(seq=self._state.out.next_seq(), terms=hello.terms)
        self._state.replicas[hello.replica].order(order)
