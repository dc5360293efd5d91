"""The handoff: SendChunk orders behind the Forwards that compute their pages, and the peer's acknowledgements.

Forward [0, 512)   SendChunk [0, 512)   Forward [512, 1000)   (first token known)   SendChunk [512, 1000) + metadata
                   └ page-aligned                                              └ unless that token ends the request
A request that is computed before its peer reserves is sent then, in chunks of about the same size.
"""

import msgspec

from headrace.core.messages.orders import SendChunk
from headrace.core.messages.peers import EndPeer
from headrace.core.messages.stage_events import ChunkAcked, SampledToken, SendFailed
from headrace.core.types.errors import CANCELLED, PEER_GONE, ErrorInfo
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.packed import pack
from headrace.core.types.requests.outcomes import HANDOFF
from headrace.core.types.requests.request import FirstToken
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.prefill.holding import HeldRequests
from headrace.scheduler.queues.deadlines import AnswerTimer, TransferTimer
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.requests.transfers import OutgoingTransfer
from headrace.scheduler.state.plan_table import Plan
from headrace.scheduler.state.state import State


class KvHandoff:
    """Sends what is computed, and ends the request when all of it is acknowledged."""

    def __init__(self, state: State, completion: Completion, holding: HeldRequests) -> None:
        self._state = state
        self._completion = completion
        self._holding = holding

    def planned(self, plan: Plan, request: Request, end: int) -> None:
        """The plan computes the request's positions below end: order the full pages among them out behind it."""
        outgoing = request.outgoing
        if outgoing is None or request.row is None or request.max_tokens == 1 or end >= request.prompt_tokens:
            return  # the last chunk waits for the first token, and a request of one token needs no KV at all
        aligned = end - end % self._state.config.page_size
        if aligned > outgoing.sent:
            plan.sends.append((request, outgoing.chunks))
            self._send(request, outgoing, aligned, plan.seq, None)

    def first_token(self, plan: Plan, request: Request, sampled: SampledToken, reason: str, now: float) -> None:
        """The plan has given the first token: send the rest. reason: why the request ends with that token, "" if it
        does not; then the peer is sent the token alone."""
        result = request.result
        result.first = request.make_first_token(sampled.token, sampled.logprob, reason)
        if reason:
            self._completion.complete(request, reason, now, result.first)
        else:
            self.prompt_computed(plan, request, sampled, now)

    def prompt_computed(self, plan: Plan, request: Request, sampled: SampledToken, now: float) -> None:
        """The plan has computed the last of a prompt whose first token is known: send the rest."""
        request.result.plan, request.result.draft_tokens = plan.seq, sampled.draft
        self._state.enter(request, Phase.INFLIGHT, now)
        self._state.count_unacknowledged(request, now)
        if request.row is not None:
            send = self.send_all if request.early_prefill else self._send_last
            send(request, now)
        if request.held:
            self._holding.computed(request, now)

    def send_all(self, request: Request, now: float) -> None:
        """Order out all that is left of a computed request that got its metadata row after it was started."""
        outgoing = request.outgoing
        assert outgoing is not None, "a row is given out when a peer has reserved"
        size, length = self._state.config.page_size, max(self._state.config.chunk_tokens, self._state.config.page_size)
        while (end := outgoing.sent + length) < request.prompt_tokens:
            self._send(request, outgoing, end - end % size, request.result.plan, None)
        self._send_last(request, now)

    def reached(self, request: Request, chunk: int, now: float) -> None:
        """Every stage has come to this SendChunk: silence about it is the peer's from now on."""
        if not request.ended and request.outgoing is not None:
            request.outgoing.reach(chunk, now)
            self._set_deadline(request, request.outgoing)

    def acked(self, event: ChunkAcked, now: float) -> None:
        """The peer has acknowledged a chunk of one stage; the last acknowledgement completes the request."""
        state = self._state
        request = state.requests.by_serial(event.request)
        outgoing = request.outgoing if request is not None else None
        if request is None or outgoing is None:
            state.drop("unknown_request")
            return
        if not outgoing.ack(event.chunk, event.stage, event.bytes, now):
            state.drop("duplicate_ack")
            return
        peer = state.peers.get(outgoing.session)
        if peer is not None:
            peer.last_ack[event.stage] = now
        if request.ended:
            return
        self._set_deadline(request, outgoing)
        if outgoing.acknowledged:
            self._completion.complete(request, HANDOFF, now)

    def send_failed(self, event: SendFailed, now: float) -> None:
        """The peer refused a chunk, or it could not be sent."""
        request = self._state.requests.by_serial(event.request)
        if request is None or request.ended:
            self._state.drop("unknown_request")
            return
        status = 499 if event.code == CANCELLED else 502
        error = ErrorInfo(code=event.code, message=event.message, status=status, stage=event.stage)
        self._completion.fail(request, error, now)

    def timed_out(self, request: Request, now: float) -> None:
        """No acknowledgement for this request. Its peer is gone, with its session and all its requests, if one of the
        stages that await one has had none from the peer for another request either."""
        outgoing = request.outgoing
        if outgoing is None or not outgoing.awaits_ack:
            return
        until = self._ack_deadline(outgoing, outgoing.unacked_stages, outgoing.silent_since)
        if until > now:
            self._state.deadlines.set(TransferTimer(request.arrival), until)
            return
        error = ErrorInfo(code=PEER_GONE, message=self._end_peer(outgoing), status=502)
        self._completion.fail(request, error, now)

    def waits_for_peer(self, request: Request, now: float) -> bool:
        """Whether stages that have not confirmed a cancelled send may be waiting for a peer that does not read.

        A peer that acknowledges nothing is gone: its session is ended, and the stages then have stage_timeout_s to
        answer. False when only the stages can be the reason.
        """
        state, outgoing = self._state, request.outgoing
        peer = state.peers.get(outgoing.session) if outgoing is not None else None
        sending = request.on_stages.stopping.intersection(state.engine.offering)
        if outgoing is None or peer is None or peer.ending or not sending:
            return False
        until = self._ack_deadline(outgoing, sending, request.since)
        if until <= now:
            self._end_peer(outgoing)
            until = now + state.config.stage_timeout_s
        state.deadlines.set(AnswerTimer(request.arrival), until)
        return True

    def _ack_deadline(self, outgoing: OutgoingTransfer, stages: set[int], since: float) -> float:
        """Time until which the peer may leave chunks of these stages unacknowledged. An acknowledgement of any chunk of
        a stage counts for all chunks of that stage. While one of our stages does not answer, it reads no
        acknowledgements either: the silence is not the peer's."""
        state = self._state
        since = max([since, *(state.engine.silent_until.get(each, since) for each in stages)])
        peer = state.peers.get(outgoing.session)
        last_ack = since if peer is None else max(since, min((peer.last_ack[each] for each in stages), default=since))
        return last_ack + state.config.transfer_timeout_s

    def _end_peer(self, outgoing: OutgoingTransfer) -> str:
        """Have the control endpoint end the peer's session, once. Returns why."""
        text = f"the decode peer acknowledged nothing for {self._state.config.transfer_timeout_s:g} s"
        peer = self._state.peers.get(outgoing.session)
        if peer is not None and not peer.ending:
            peer.ending = True
            self._state.out.add(EndPeer(session=outgoing.session, reason=text))
        return text

    def _send_last(self, request: Request, now: float) -> None:
        """Order the last chunk out, with the metadata row."""
        outgoing = request.outgoing
        assert outgoing is not None, "a row is given out when a peer has reserved"
        if request.submit.progress:
            self._state.out.add(request.progress("transferring", request.prompt_tokens))
        outgoing.last_ordered = True
        assert request.result.first is not None, "it is computed"
        last = msgspec.structs.replace(request.result.first, draft=request.peer_draft())
        self._send(request, outgoing, request.prompt_tokens, request.result.plan, last)
        self.reached(request, outgoing.chunks - 1, now)

    def _set_deadline(self, request: Request, outgoing: OutgoingTransfer) -> None:
        if outgoing.awaits_ack:
            timeout = self._state.config.transfer_timeout_s
            self._state.deadlines.set(TransferTimer(request.arrival), outgoing.silent_since + timeout)
        else:
            self._state.deadlines.clear(TransferTimer(request.arrival))

    def _send(
        self, request: Request, outgoing: OutgoingTransfer, end: int, after: int, last: FirstToken | None
    ) -> None:
        """Order positions [sent, end) out. The first page on either side is the one that holds position sent."""
        state = self._state
        assert request.lease is not None, "a request that was computed has pages"
        assert request.row is not None, "a row is given out when a peer has reserved"
        start, size = outgoing.sent, state.config.page_size
        replica = state.of(request)
        request.on_stages.known = True
        replica.order(
            SendChunk(
                seq=state.out.next_seq(),
                request=request.serial,
                after=after,
                session=outgoing.session,
                ticket=outgoing.ticket,
                generation=outgoing.generation,
                chunk=outgoing.chunks,
                start=start,
                count=end - start,
                pages=pack(request.lease.pages[start // size : ceil_div(end, size)]),
                dst_pages=pack(outgoing.dst_pages_until(end)),
                row=request.row,
                dst_row=outgoing.dst_row,
                slot=request.lease.slot,
                dst_slot=outgoing.dst_slot,
                last=last,
            )
        )
        outgoing.add_chunk(end, [rank for rank in replica.ranks if rank in state.engine.offering])
