"""Several continuations at once, for several prompts or n > 1."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headrace.core.messages.frontend import Progress
from headrace.core.types.request import TokenLogprob
from headrace.server.frontend.generation import Delta, GenerationResult, Job
from headrace.server.frontend.service import Service

EmitChoice = Callable[[int, Progress | Delta], Awaitable[None]]


class Choice:
    """What has come of one continuation."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs


async def run_choices(
    service: Service, jobs: Sequence[Job], emit: EmitChoice, ended: Callable[[int, GenerationResult], Awaitable[None]]
) -> list[GenerationResult]:
    """Run the jobs beside each other. The first one that fails takes the others back, and its HeadraceError is
    raised. emit and ended are told the position of the job."""

    async def run(index: int, job: Job) -> GenerationResult:
        async def emit_one(event: Progress | Delta) -> None:
            await emit(index, event)

        result = await service.complete(job, emit_one)
        await ended(index, result)
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(index, job)) for index, job in enumerate(jobs)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def collect(service: Service, jobs: Sequence[Job]) -> list[tuple[Choice, GenerationResult]]:
    """Run the jobs to their ends."""
    found = [Choice() for _ in jobs]

    async def take(index: int, event: Progress | Delta) -> None:
        if isinstance(event, Delta):
            found[index].take(event)

    async def ended(_index: int, _result: GenerationResult) -> None:
        pass

    return list(zip(found, await run_choices(service, jobs, take, ended), strict=True))
