"""The declared transitions of every state machine, in one table: machine, state before > state after, and the events.

request   see scheduler/requests/phase.py: held (ticket flow), sent (rendezvous), fetched, own (decoded here, or not)
ticket    see scheduler/peers/tickets.py         incoming transfer, remote writer   see core/incoming.py
peers     see scheduler/peers/peer_tables.py     session, inbound and outbound KV   see transfer/

"-" is before it is there, "gone" when nothing is left of it. "next" is what follows by itself: planning, and starting
what has room now. A transition that is not here breaks a guarantee.

A request that was started before its peer came and has to give up its pages begins again in bootstrap: at once, or with
the pass that it is in, which may be its last one; in waiting if its peer has come during that pass. One that was
fetched, preempted, and whose KV does not come a second time goes from fetching to waiting.
"""

from collections.abc import Iterable, Iterator

from tests.soak.coverage import Transition

TABLE = """
own request
    - > waiting            : Submit
    waiting > running      : next
    waiting > done         : Abort, next
    waiting > failed       : Abort, StageFailed, deadline REQUEST
    running > generating   : PlanDone
    running > waiting      : PagesLoaded, PlanDone
    running > done         : Abort, PlanDone
    running > failed       : Abort, PlanDone, StageFailed, deadline REQUEST
    generating > waiting   : PlanDone, next
    generating > done      : Abort, PlanDone, next
    generating > failed    : Abort, PlanDone, StageFailed, deadline REQUEST
    done > gone            : Abort, PlanDone, StageFailed, next
    failed > gone          : Abort, PlanDone, StageFailed, deadline REQUEST
fetched request
    - > waiting            : Submit
    waiting > fetching     : next
    waiting > running      : next
    waiting > done         : Abort
    waiting > failed       : Abort, PrefillDown, PrefillUp, StageFailed, deadline REQUEST
    running > generating   : PlanDone
    running > waiting      : PagesLoaded, PlanDone
    running > done         : Abort, PlanDone
    running > failed       : Abort, PlanDone, StageFailed, deadline REQUEST
    fetching > generating  : KvReceived
    fetching > waiting     : next
    fetching > done        : Abort, TicketFinished, KvReceived
    fetching > failed      : Abort, PrefillDown, PrefillUp, StageFailed, TicketFailed, TicketFinished, KvReceived
    fetching > failed      : deadline REQUEST
    generating > waiting   : PlanDone, KvReceived, next
    generating > done      : Abort, PlanDone, next
    generating > failed    : Abort, PlanDone, StageFailed, deadline REQUEST
    done > gone            : Abort, PlanDone, ReceiveCancelled, SessionClosed, StageFailed, TicketCancelled, next
    done > gone            : TicketFailed, TicketFinished, KvReceived
    failed > gone          : Abort, PlanDone, PrefillDown, ReceiveCancelled, SessionClosed, StageFailed
    failed > gone          : deadline REQUEST, TicketCancelled, TicketFailed, TicketFinished
    failed > gone          : deadline LEFTOVER, next
held request
    - > bootstrap          : Submit
    - > waiting            : Submit
    bootstrap > waiting    : Abort, ChunkAcked, PeerCancelled, PeerGone, PeerReserved, SendCancelled, SendFailed, Submit
    bootstrap > waiting    : deadline REQUEST, deadline TRANSFER, next
    bootstrap > failed     : Abort, PeerCancelled, PeerGone, PeerReleased, PeerReserved, StageFailed, Submit
    bootstrap > failed     : deadline REQUEST
    waiting > bootstrap    : PeerReserved, PlanDone
    waiting > running      : next
    waiting > failed       : Abort, PeerCancelled, PeerGone, PeerReleased, PeerReserved, StageFailed, deadline REQUEST
    running > inflight     : PlanDone
    running > waiting      : PagesLoaded
    running > done         : PlanDone
    running > failed       : Abort, PeerCancelled, PeerGone, PeerReleased, PeerReserved, PlanDone, StageFailed
    running > failed       : deadline REQUEST, deadline TRANSFER
    inflight > done        : ChunkAcked
    inflight > failed      : Abort, PeerCancelled, PeerGone, PeerReleased, PeerReserved, StageFailed
    inflight > failed      : deadline LEASE, deadline TRANSFER
    done > gone            : ChunkAcked, PlanDone, SendCancelled, StageFailed
    failed > gone          : Abort, PeerCancelled, PeerGone, PeerReleased, PlanDone, SendCancelled, StageFailed
    failed > gone          : PeerReserved, Submit, deadline LEASE, deadline REQUEST, deadline TRANSFER
sent request
    - > bootstrap          : Submit
    - > waiting            : Submit
    bootstrap > waiting    : PeerReserved, Submit
    bootstrap > waiting    : Abort, ChunkAcked, PeerCancelled, PeerGone, SendCancelled, SendFailed
    bootstrap > waiting    : deadline REQUEST, deadline TRANSFER, next
    bootstrap > failed     : Abort, PeerCancelled, PeerGone, PeerReleased, PeerReserved, StageFailed, Submit
    bootstrap > failed     : deadline BOOTSTRAP, deadline REQUEST
    waiting > bootstrap    : PeerReserved, PlanDone
    waiting > running      : next
    waiting > failed       : Abort, PeerCancelled, PeerGone, PeerReleased, PeerReserved, StageFailed
    waiting > failed       : deadline BOOTSTRAP, deadline REQUEST
    running > inflight     : PlanDone
    running > waiting      : PagesLoaded, PlanDone
    running > bootstrap    : PlanDone, next
    running > done         : PlanDone
    running > failed       : Abort, PeerCancelled, PeerGone, PeerReleased, PeerReserved, PlanDone, StageFailed
    running > failed       : deadline BOOTSTRAP, deadline REQUEST, deadline TRANSFER
    inflight > waiting     : PlanDone
    inflight > bootstrap   : PlanDone, next
    inflight > done        : ChunkAcked
    inflight > failed      : Abort, PeerCancelled, PeerGone, PeerReleased, PeerReserved, StageFailed
    inflight > failed      : deadline BOOTSTRAP, deadline REQUEST, deadline TRANSFER
    done > gone            : ChunkAcked, PlanDone, SendCancelled, StageFailed
    failed > gone          : Abort, PeerCancelled, PeerGone, PeerReleased, PlanDone, SendCancelled, StageFailed
    failed > gone          : PeerReserved, Submit, deadline BOOTSTRAP, deadline REQUEST, deadline TRANSFER
incoming transfer
    preparing > reserved   : ReceivePrepared
    preparing > ended      : PrefillDown, PrefillUp
    reserved > received    : KvReceived
    reserved > ended       : PrefillDown, PrefillUp, TicketCancelled, TicketFailed, TicketFinished
remote writer
    idle > writing         : ReceivePrepared
    idle > stopped         : StageFailed
    writing > stopped      : KvReceived, SessionClosed, StageFailed, TicketCancelled, TicketFailed, TicketFinished
ticket
    free > claimed         : Submit
    free > early           : PeerReserved
    free > ended           : Submit, deadline RESERVATION
    free > ended           : PeerReserved, StageFailed
    free > abandoned       : PeerReleased
    abandoned > free       : Submit, PeerReserved
    abandoned > ended      : Submit
    ended > abandoned      : PeerReleased
    ended > early          : PeerReserved
    ended > claimed        : Submit
    early > claimed        : Submit
    early > free           : PeerCancelled, PeerGone, Submit, StageFailed, deadline RESERVATION
    claimed > reserved     : PeerReserved, Submit
    claimed > ended        : Abort, PeerReleased, PlanDone, StageFailed
    claimed > ended        : deadline BOOTSTRAP, deadline LEASE, deadline REQUEST
    reserved > ended       : Abort, ChunkAcked, PeerCancelled, PeerGone, PeerReserved, PlanDone, StageFailed, Submit
    reserved > ended       : deadline REQUEST, deadline TRANSFER
decode peer
    - > open               : PeerJoined
    open > -               : PeerGone
    ending > -             : PeerGone
prefill server
    - > down               : AddPrefill
    down > up              : PrefillUp
    up > down              : PrefillDown
session
    - > open               : hello
    open > -               : drop
protocol ticket
    - > open               : Reserve
    - > ended              : Cancel, Reserve
    open > cancelling      : Cancel
    open > ended           : TellFailed, TellFinished
    cancelling > ended     : TellCancelled, TellFailed, TellFinished
inbound KV
    - > open               : prepare
    open > -               : arrive, close
outbound KV
    - > closed             : fail
    - > cancelling         : cancel
    open > closed          : fail
    open > cancelling      : cancel
    closed > cancelling    : cancel
    open > -               : release
    closed > -             : release
"""


def _parse(table: str) -> Iterator[Transition]:
    machine = ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            machine = line
            continue
        states, _, events = line.partition(" : ")
        before, after = (state.strip() for state in states.split(" > "))
        for event in events.split(", "):
            yield machine, before, event, after


DECLARED = frozenset(_parse(TABLE))


def undeclared(seen: Iterable[Transition]) -> set[Transition]:
    """Transitions that were seen and are not in the table."""
    return set(seen) - DECLARED
