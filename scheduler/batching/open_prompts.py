"""Open prompts: their pieces are computed in passes of their own while there is nothing else to compute, so that their
KV is in the prefix cache when they are committed.

    passes of others   ├─── 512 ───┤├─ 230 ─┤                          ▼ arrives ├─── 512 ───┤
    passes of pieces                         ├─── 512 ───┤├─── 512 ─── ╳ is cancelled
         … where stages cannot cancel one    ├ 128 ┤├ 128 ┤├ 128 ┤├ 128 ┤ others wait for one of them at most

A piece is a request without a token: it ends when its whole pages are computed. It keeps no pages between its passes:
they are in the prefix cache, where others may take them, and its next pass begins behind those that are left there.
"""

from headrace.core.messages.orders import CancelForward
from headrace.core.messages.replies import Progress
from headrace.core.types.requests.outcomes import DISCARDED
from headrace.scheduler.batching.starting import LOOKED_AT
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State


class OpenPieces:
    """Chooses the pieces of the next pass of a replica, and leases their pages."""

    def __init__(self, state: State, replica: Replica, completion: Completion) -> None:
        self._state = state
        self._replica = replica
        self._completion = completion
        self._refused: tuple[int, int] | None = None  # what there was when no piece could be started

    @property
    def may_run(self) -> bool:
        """There are pieces, and nothing else can be computed now, or is being computed by the first stage."""
        replica = self._replica
        queues = replica.queues
        return bool(queues.open) and not queues.runnable and next(replica.plans.of_first_stage(), None) is None

    @property
    def pass_tokens(self) -> int:
        """Tokens of the next pass."""
        return self._replica.piece_passes.tokens(cancels=self._state.engine.cancels)

    def give_way(self) -> None:
        """Cancel the passes of pieces that are under way: there is something else to compute, or nothing any more."""
        for plan in self._replica.plans:
            if plan.gives_way and not plan.cancelled:
                plan.cancel()
                self._replica.order(CancelForward(seq=self._state.out.next_seq(), forward=plan.seq))

    def divide(self, left: int, slots: int, now: float) -> list[tuple[Request, int]]:
        """Pieces and the tokens that each has in a pass of left tokens and slots rows at most, which are started. Those
        that have nothing left to compute end."""
        queues, before = self._replica.queues, self._replica.cache.version
        chosen: list[tuple[Request, int]] = []
        over: list[tuple[Request, int]] = []  # with the positions that are cached
        looked_at = LOOKED_AT if self._refused != (before, len(queues.open)) else 0
        for request in queues.open.order(now):
            if not looked_at or left < self._state.config.page_size or len(chosen) >= slots:
                break
            looked_at -= 1
            if queues.look_up(request, now):
                continue  # it comes up again at its place
            cached = request.queued.expected_cached
            if cached >= request.target or cached < request.kept:
                over.append((request, cached))
            elif count := self._start(request, min(left, request.target - cached), now):
                chosen.append((request, count))
                left -= count
        for request, cached in over:
            if request.submit.progress:
                done, total = min(cached, request.target), request.prompt_tokens
                self._state.out.add(Progress(rid=request.rid, phase="computing", done=done, total=total))
            self._completion.complete(request, DISCARDED, now)
        if not chosen:
            self._refused = (self._replica.cache.version, len(queues.open))
        return chosen

    def finish(self, request: Request, now: float) -> None:
        """No more of a piece is planned: it ends at once, or with the pass that it is in."""
        request.target = request.computed
        if request.phase is Phase.WAITING:
            self._completion.complete(request, DISCARDED, now)

    def _start(self, request: Request, count: int, now: float) -> int:
        """Lease pages for the next tokens of a piece; returns how many, 0 where there is no place for them."""
        state, replica, size = self._state, self._replica, self._state.config.page_size
        end = request.queued.expected_cached + count // size * size
        lease = replica.cache.acquire(request.packed(0, end), request.salt, piece=True)
        if lease is None:
            return 0
        request.lease = lease
        request.queued.expected_cached = 0
        request.computed = cached = lease.matched * size
        replica.queues.plan(request, cached)
        if not request.preempted:
            request.cached_tokens = cached
        state.enter(request, Phase.RUNNING, now)
        return min(count // size * size, end - cached)
