"""Liveness and readiness: whether the server works, and whether it would accept a request now."""

from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.served_model import ServedModel
from headrace.server.upstream.prefill_pool import PrefillPool

_DRAINING = refusals.DRAINING.error()


class Readiness:
    """What /health and /ready answer, and what refuses requests that could not be served.

    prefills: the prefill servers of a decode server that cannot serve without one; None if there is no need for any.
    """

    def __init__(self, client: SchedulerClient, model: ServedModel, prefills: PrefillPool | None) -> None:
        self._client = client
        self._model = model
        self._prefills = prefills
        self._leaving = False
        self._draining = False

    def start_leaving(self) -> None:
        """Be not ready from now on, and serve all the same: routers may not know yet."""
        self._leaving = True

    def start_draining(self) -> None:
        """Be not ready from now on, and refuse requests."""
        self._leaving = self._draining = True

    def unhealthy(self) -> str | None:
        """Why the server counts as dead, or None."""
        return self._client.problem()

    def not_ready(self) -> ErrorInfo | None:
        """Why requests should be sent elsewhere (503), or None: they would be refused, or soon will be."""
        return self.refusal() or (_DRAINING if self._leaving else None)

    def refusal(self) -> ErrorInfo | None:
        """Why a request would be refused now (503), or None."""
        if (problem := self.engine_not_ready()) is not None:
            return problem
        if self._prefills is not None and (why := self._prefills.problem()):
            return refusals.NO_PREFILL_SERVER.error(problem=why)
        return None

    def engine_not_ready(self) -> ErrorInfo | None:
        """Why a request that names its own prefill server would be refused now (503), or None."""
        engine = self._client.engine
        if problem := self.unhealthy():
            return refusals.SCHEDULER_SILENT.error(problem=problem)
        if excuse := self._client.excuse():
            return refusals.SCHEDULER_SILENT.error(problem=excuse)
        if self._draining:
            return _DRAINING
        if engine is not None and not engine.ready and engine.reason:
            return refusals.ENGINE_DOWN.error(reason=engine.reason)
        if engine is None or not engine.ready:
            return refusals.LOADING.error()
        if not self._model.loaded:
            return refusals.NO_TOKENIZER.error()
        return None

    async def wait_engine_ready(self) -> None:
        """Wait until all stages have loaded. A decode server may then still lack a prefill server."""
        await self._client.wait_for(lambda: self._client.engine is not None and self._client.engine.ready)

    async def wait_ready(self) -> None:
        """Wait until /ready says that the server would serve."""
        await self._client.wait_for(lambda: self.not_ready() is None)

    async def next_engine_news(self, previous: str) -> str:
        """One sentence on the state of the stages; waits until it differs from the previous one."""
        await self._client.wait_for(lambda: self._engine_news() not in ("", previous))
        return self._engine_news()

    def _engine_news(self) -> str:
        engine = self._client.engine
        if engine is None:
            return ""
        return "all stages are up" if engine.ready else engine.reason
