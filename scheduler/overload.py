"""Refusal of requests that would wait too long: bounds of the queue, and the predicted time to first token.

    tokens, requests queued        always; a tenant with less than its share of them is let in beside others
    seconds of work queued         --max-queued-seconds
    predicted time to first token  --max-predicted-ttft, and the request's own slo_ttft_ms under --refuse-unreachable
    promised time to first token   the request's own slo_ttft_ms under --promise, in place of the predicted one

Seconds refuse nothing while the cost model is stale, or has seen no plan: the bounds on tokens and requests alone do.
"""

from headrace.core.messages.frontend import Submit
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import packed_length
from headrace.scheduler.requests.parts import TtftPromise
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State
from headrace.scheduler.state.ttft_prediction import Prediction

MIN_RETRY_S = 0.05


class Overload:
    """Decides whether a request that fits would wait too long."""

    def __init__(self, state: State) -> None:
        self._state = state

    def full(self, submit: Submit) -> ErrorInfo | None:
        """Bounds in tokens and requests. A prompt larger than the token bound still gets in when nothing else is
        queued, or nothing of its tenant where others have queued."""
        state, by_tenant = self._state, self._state.queued_by_tenant
        length, limit, unplanned = packed_length(submit.prompt), state.config.max_queued_tokens, state.unplanned
        if unplanned and unplanned + length > limit:
            reason, kind, counted = "tokens", refusals.QUEUED_TOKENS, unplanned
            admitted = by_tenant.tokens.within_equal_share(submit.terms.tenant, length, limit)
        else:
            reason, kind, counted = "requests", refusals.QUEUED_REQUESTS, by_tenant.requests.total
            admitted = by_tenant.requests.admits(submit.terms.tenant, 1, state.config.max_queued_requests)
        if admitted:
            return None
        excess = max(1, min(unplanned, unplanned + length - limit))
        self._count(reason)
        retry_s = _retry(state.metrics.rate.seconds_for(excess) / state.config.dp)
        return kind.error(predicted_s=retry_s, queued=counted, own=length, limit=limit)

    def too_late(
        self, submit: Submit, replica: Replica, prediction: Prediction, promise: TtftPromise | None
    ) -> ErrorInfo | None:
        """Bounds in seconds, for the replica that would compute the request. Those of the server let a prompt in when
        nothing else is queued or running there, however long it takes; an objective that the prompt cannot meet alone
        is refused without a time to retry. promise: what it would be promised, which its objective is compared with."""
        if not replica.costs.trusted:
            return None
        late = self._queue(submit, prediction) or self._server(prediction)
        return late or self._objective(submit, prediction, promise)

    def _queue(self, submit: Submit, prediction: Prediction) -> ErrorInfo | None:
        limit, queued, own = self._state.config.max_queued_s, prediction.queued_s, prediction.alone_s
        if not limit or not queued or queued + own <= limit:
            return None
        tokens, length = self._state.queued_by_tenant.tokens, packed_length(submit.prompt)
        if tokens.within_equal_share(submit.terms.tenant, length, tokens.total + length):
            return None
        self._count("seconds")
        retry_s = _retry(prediction.retry_after_s(min(queued, queued + own - limit)))
        return refusals.QUEUED_SECONDS.error(predicted_s=retry_s, queued=queued, own=own, limit=limit)

    def _server(self, prediction: Prediction) -> ErrorInfo | None:
        limit, predicted = self._state.config.max_predicted_ttft_s, prediction.ttft_s
        if not limit or not prediction.queued_s or predicted <= limit:
            return None
        self._count("predicted_ttft")
        excess = predicted - max(limit, prediction.alone_s)
        retry_s = _retry(prediction.retry_after_s(max(0.0, excess)))
        return refusals.LATE_FOR_SERVER.error(predicted_s=retry_s, predicted=predicted, limit=limit)

    def _objective(self, submit: Submit, prediction: Prediction, promise: TtftPromise | None) -> ErrorInfo | None:
        wanted, predicted, alone = submit.terms.slo_ttft_s, prediction.ttft_s, prediction.alone_s
        expected = predicted if promise is None else promise.bound_s
        if wanted is None or not self._state.config.refuse_unreachable or expected <= wanted:
            return None
        self._count("objective")
        if alone > wanted:
            return refusals.LATE_ALONE.error(predicted=predicted, wanted=wanted, alone=alone)
        excess_s = predicted - wanted if promise is None else predicted * (1 - wanted / expected)
        retry_s = _retry(prediction.retry_after_s(excess_s))
        if promise is None:
            return refusals.LATE_FOR_REQUEST.error(predicted_s=retry_s, predicted=predicted, wanted=wanted)
        return refusals.NOT_PROMISED.error(predicted_s=retry_s, bound=expected, wanted=wanted)

    def _count(self, reason: str) -> None:
        self._state.metrics.counters.add("overload_refusals_total", labels=(reason,))


def _retry(seconds: float) -> float:
    return max(MIN_RETRY_S, round(seconds, 3))
