"""The stage's compute loop: executes plans in stream order, with hidden states passed from stage to stage.

Three stages, plans 1 to 4, two of which decode the same request (2 feeds 4):

    stage 0   [1 ][2 ][3 ]···:[4 ]            :  waits for the token of plan 2
                 ╲   ╲   ╲   ▲    ╲           ╲  hidden states, sent and received asynchronously
    stage 1       [1 ][2 ][3 ]·····[4 ]       │  tokens, broadcast by the last stage
                     ╲   ╲   ╲         ╲
    stage 2           [1 ][2 ]│[3 ]·····[4 ]
                              └ sampled

One turn: queue new orders │ wait for tokens and hidden states │ layers │ send or sample │ broadcast tokens │ report.
Receives of all queued plans are posted before the wait and before the layers, so that the hidden states of the next
plan travel while this one is computed. Sends are waited for when they are known to have arrived.

Where servers with a scheduler each share experts, they agree on every pass before it (engine/agreement.py).
"""

import contextlib
import queue
import time
from collections import deque

from headrace.core.messages.orders import AnyOrder, Forward, ReleaseRequest, ShutdownStage
from headrace.engine.agreement import PassSource
from headrace.engine.collectives.operations import LinkBroken
from headrace.engine.kv.page_digest import digest_pages
from headrace.engine.orders import Inbox
from headrace.engine.outbox import PlanOutbox, QueuedPlan
from headrace.engine.parallel.pipeline import PipelineLinks
from headrace.engine.row_sampler import Sampling
from headrace.engine.runner import Runner
from headrace.engine.telemetry.meter import Meter


class StageLoop:
    """Executes the orders of the stream that need the model, until ShutdownStage. Used by the compute thread alone."""

    def __init__(
        self,
        stage: int,
        runner: Runner,
        links: PipelineLinks,
        meter: Meter,
        inbox: Inbox,
        outbox: PlanOutbox,
        passes: PassSource | None = None,
    ) -> None:
        """stage: the rank. inbox: orders from the I/O thread. outbox: its reports. passes: agrees with other servers
        on each pass; None where there are none."""
        self._stage = stage
        self._runner = runner
        self._links = links
        self._meter = meter
        self._inbox = inbox
        self._outbox = outbox
        self._passes = passes
        self._queued: deque[AnyOrder] = deque()  # received and not yet executed, in order

    def run(self) -> None:
        """Execute orders until ShutdownStage. Raises LinkBroken, and what the runner raises."""
        while True:
            match self._next():
                case Forward() as plan:
                    self._execute(plan)
                case ReleaseRequest(request=request):
                    self._runner.release(request)
                    self._links.release(request)
                case _:
                    self._links.close()
                    return

    def shutdown_within(self, timeout_s: float) -> bool:
        """After a failure: drop the remaining orders. Returns whether ShutdownStage is among them or arrives within
        timeout_s seconds."""
        deadline = time.monotonic() + timeout_s
        found = any(isinstance(order, ShutdownStage) for order in self._queued)
        while not found and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                found = isinstance(self._inbox.get(timeout=left), ShutdownStage)
        return found

    def _next(self) -> AnyOrder:
        if self._passes is not None:
            self._drain_inbox()
            self._meter.wait()
            return self._passes.next(self._queued, self._idle)
        if not self._queued:
            self._idle()
        self._drain_inbox()
        return self._queued.popleft()

    def _idle(self, timeout_s: float | None = None) -> None:
        """Wait for an order, and take all that have arrived."""
        self._meter.idle()
        with contextlib.suppress(queue.Empty):
            self._enqueue(self._inbox.get(timeout=timeout_s))
        self._drain_inbox()

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():  # this thread is its only consumer
            self._enqueue(self._inbox.get_nowait())

    def _enqueue(self, order: AnyOrder | LinkBroken) -> None:
        if isinstance(order, LinkBroken):
            raise order
        self._queued.append(order)
        if isinstance(order, Forward) and order.rows:
            self._links.post_receive(order)

    def _execute(self, plan: Forward) -> None:
        self._runner.progress.begin(plan.seq)
        if plan.rows:
            self._compute(plan)
        else:
            self._join(plan)

    def _join(self, plan: Forward) -> None:
        """Take part in a pass in which this replica is idle. All its ranks know that, so that nothing passes from stage
        to stage and nothing is sampled."""
        self._meter.begin(plan)
        self._meter.mark()
        self._outbox.begin()
        if plan.agreement is not None:
            self._runner.join(plan.agreement)
        self._meter.mark()
        run, seconds = self._meter.end()
        if plan.seq:  # 0: a pass of other servers, which this one's scheduler does not know of
            self._outbox.post(QueuedPlan(run, self._stage, seconds))

    def _compute(self, plan: Forward) -> None:
        runner, links, meter = self._runner, self._links, self._meter
        meter.begin(plan)
        for fed in links.tokens_for(plan.rows):
            runner.feed(fed)
        hidden = links.receive(plan)
        meter.mark()
        self._drain_inbox()
        self._outbox.begin()
        hidden = runner.forward(plan.rows, hidden, plan.agreement)
        meter.mark()
        sampling: Sampling | None = None
        if links.last:
            sampling = runner.sample(plan.rows, hidden)
        else:
            meter.add_hidden_bytes(links.send(plan, hidden))
        links.broadcast(plan, sampling)
        run, seconds = meter.end()
        digest = digest_pages(runner.pool, plan.digest) if plan.digest is not None else ()
        self._outbox.post(QueuedPlan(run, self._stage, seconds, sampling, digest))
