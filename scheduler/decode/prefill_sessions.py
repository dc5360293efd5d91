"""Sessions with prefill servers: data connections are opened when one is up, and its requests fail when it is not."""

from headrace.core.messages.frontend import AddPrefill, PrefillState, RemovePrefill
from headrace.core.messages.orders import CloseSession, OpenSession
from headrace.core.messages.peers import ConnectPrefill, DisconnectPrefill, PrefillDown, PrefillUp
from headrace.core.types.errors import PEER_GONE, ErrorInfo
from headrace.scheduler.admission import no_prefill
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.requests.record import Phase
from headrace.scheduler.state.peer_tables import PrefillServer
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
        self._end_session(server, "removed", now)
        self._state.prefills.remove(event.name)
        self._state.out.add(DisconnectPrefill(name=event.name))

    def up(self, event: PrefillUp, now: float) -> None:
        """A session has begun. What was being fetched through the one before it is lost."""
        server = self._state.prefills.get(event.name)
        if server is None:
            self._state.drop("unknown_prefill")
            return
        if server.session is not None:
            self._end_session(server, "a new session began", now)
        server.hello = event
        if self._state.engine.ready:
            self._open_session(event)
        self._state.out.add(PrefillState(name=event.name, up=True))

    def down(self, event: PrefillDown, now: float) -> None:
        """A session has ended, or a prefill server refused us."""
        server = self._state.prefills.get(event.name)
        if server is None or (event.session is not None and event.session != server.session):
            self._state.drop("unknown_prefill")
            return
        self._end_session(server, event.reason, now)

    def stages_up(self) -> None:
        """Have stages that have just come up open their data connections."""
        for server in self._state.prefills:
            if server.hello is not None:
                self._open_session(server.hello)

    def _end_session(self, server: PrefillServer, reason: str, now: float) -> None:
        """Fail the requests whose KV was to come through the session, and have the stages close it."""
        state = self._state
        session, server.hello = server.session, None
        for request in list(server.requests.values()):
            if request.phase is Phase.WAITING and request.incoming is None:
                self._completion.fail(request, no_prefill(server.name, "down"), now)
            elif request.phase is Phase.FETCHING and request.incoming is not None:
                request.incoming.lose()
                error = ErrorInfo(code=PEER_GONE, message=f"the prefill server is gone: {reason}", status=502)
                self._completion.fail(request, error, now)
        if session is not None and state.engine.ready:
            state.prefills.revoke(session, state.engine.stages)
            state.out.add(CloseSession(seq=state.out.next_seq(), session=session))
        state.out.add(PrefillState(name=server.name, up=False, reason=reason))

    def _open_session(self, hello: PrefillUp) -> None:
        out = self._state.out
        out.add(
            OpenSession(
                seq=out.next_seq(),
                session=hello.session,
                endpoints=hello.endpoints,
                geometries=hello.geometries,
                stage_replicas=hello.stage_replicas,
                window_bytes=hello.window_bytes,
                server_key=hello.server_key,
                backend=hello.backend,
            )
        )
