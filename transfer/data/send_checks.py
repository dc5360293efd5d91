"""Checks of what a sender is asked to do: a peer's Attach message, and the scheduler's SendChunk order. Pure."""

from headrace.core.messages.orders import SendChunk
from headrace.core.types.packed import packed_length
from headrace.transfer.data.outgoing import Lane, OutSession
from headrace.transfer.protocol import messages
from headrace.transfer.protocol.layout import pages_for
from headrace.transfer.protocol.messages import Attach, Refuse


def attached_lane(session: OutSession | None, stage: int, attach: Attach) -> Lane | Refuse:
    """The lane that an Attach asks for, or why it is refused. session: the one it names. stage: number in Welcome."""
    if session is None:
        return Refuse(code=messages.NO_SESSION, message="no session of this name is admitted here")
    if attach.stage != stage:
        return Refuse(code=messages.WRONG_STAGE, message=f"stage {stage} here, {attach.stage} asked for")
    lane = session.lanes.get(attach.peer_stage)
    if lane is None:
        text = f"stage {stage} shares no layers and heads with stage {attach.peer_stage} of the peer"
        return Refuse(code=messages.WRONG_STAGE, message=text)
    return lane


def page_error(order: SendChunk, page_size: int, peer_page_size: int) -> str:
    """How the page lists of an order do not fit its positions; "" when they do. Page sizes are in tokens."""
    needed = pages_for(page_size, order.start, order.count), pages_for(peer_page_size, order.start, order.count)
    given = packed_length(order.pages), packed_length(order.dst_pages)
    return "" if given == needed else f"source and destination pages: {given} given, {needed} needed"
