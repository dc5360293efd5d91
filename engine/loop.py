"""The compute thread's loop: orders in stream order, and hidden states from stage to stage.

Three stages, plans 1 to 4, two of which decode the same request (2 feeds 4):

    stage 0   [1 ][2 ][3 ]···:[4 ]            :  waits for the token of plan 2
                 ╲   ╲   ╲   ▲    ╲           ╲  hidden states, sent and received asynchronously
    stage 1       [1 ][2 ][3 ]·····[4 ]       │  tokens, broadcast by the last stage
                     ╲   ╲   ╲         ╲
    stage 2           [1 ][2 ]│[3 ]·····[4 ]
                              └ sampled

One turn: take in what has come │ tokens, hidden states (wait) │ layers │ pass on or sample │ share tokens │ report.
Receives of all plans that have come in are posted before the wait and before the layers, so that the hidden states of
the next plan travel while this one is computed. Nobody waits for a send.
"""

import contextlib
import queue
import time
from collections import deque

from headrace.core.messages.orders import AnyOrder, Forward, ReleaseRequest, ShutdownStage
from headrace.core.messages.stage_events import PlanDone, PromptLogprobs, SampledToken
from headrace.engine.io_thread import Computed, EventOutbox
from headrace.engine.parallel.pipeline import PipelineLinks
from headrace.engine.runner import Runner
from headrace.engine.telemetry.meter import Meter


class StageLoop:
    """Executes the stream until ShutdownStage. Raises LinkBroken, and whatever the runner raises."""

    def __init__(
        self,
        stage: int,
        runner: Runner,
        links: PipelineLinks,
        meter: Meter,
        inbox: "queue.Queue[AnyOrder]",
        outbox: EventOutbox,
    ) -> None:
        self._stage = stage
        self._runner = runner
        self._links = links
        self._meter = meter
        self._inbox = inbox
        self._outbox = outbox
        self._ahead: deque[AnyOrder] = deque()  # taken in, in order, and not yet executed

    def run(self) -> None:
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

    def halts_within(self, timeout_s: float) -> bool:
        """After a failure: drop what is left to do, and see whether a ShutdownStage is among it or comes in this
        time."""
        deadline = time.monotonic() + timeout_s
        halted = any(isinstance(order, ShutdownStage) for order in self._ahead)
        while not halted and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                halted = isinstance(self._inbox.get(timeout=left), ShutdownStage)
        return halted

    def _next(self) -> AnyOrder:
        if not self._ahead:
            self._meter.idle()
            self._take_in(self._inbox.get())
        self._look_ahead()
        return self._ahead.popleft()

    def _look_ahead(self) -> None:
        while not self._inbox.empty():  # nobody else takes from it
            self._take_in(self._inbox.get_nowait())

    def _take_in(self, order: AnyOrder) -> None:
        self._ahead.append(order)
        if isinstance(order, Forward):
            self._links.expect(order)

    def _execute(self, plan: Forward) -> None:
        runner, links, meter = self._runner, self._links, self._meter
        meter.begin(plan)
        runner.feed(links.tokens_for(plan.rows))
        hidden = links.take(plan)
        meter.step()
        self._look_ahead()
        hidden = runner.forward(plan.rows, hidden)
        meter.step()
        samples: list[SampledToken] = []
        prompt_logprobs: list[PromptLogprobs] = []
        if links.last:
            samples, prompt_logprobs = runner.sample(plan.rows, hidden)
        else:
            meter.passed_on(links.pass_on(plan, hidden))
        links.share(plan, samples)
        run, seconds = meter.end()
        done = PlanDone(
            stage=self._stage,
            seq=plan.seq,
            duration_s=seconds,
            samples=tuple(samples),
            prompt_logprobs=tuple(prompt_logprobs),
        )
        self._outbox.post(Computed(run, done))
