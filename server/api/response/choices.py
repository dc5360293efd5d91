"""The choices of one response: several generation requests that run concurrently."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from headrace.core.messages.replies import Progress
from headrace.core.types.requests.request import TokenLogprob
from headrace.server.frontend.generation.completions import Completions
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationRequest, GenerationResult

CHARS, PROMPT_TOKENS = 64, 16  # that take as long to put into a response as the logprobs of one position
T = TypeVar("T")
EmitChoice = Callable[[int, Progress | GenerationDelta], Awaitable[None]]


class Choice:
    """What was generated for one request so far."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.end_logprobs: tuple[TokenLogprob, ...] = ()
        self.offsets: list[int] = []
        self.end_offsets: tuple[int, ...] = ()
        self.end_tokens: tuple[int, ...] = ()

    def add(self, delta: GenerationDelta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.end_logprobs += delta.end_logprobs
        self.offsets += delta.offsets
        self.end_offsets += delta.end_offsets
        self.end_tokens += delta.end_tokens

    @property
    def sampled(self) -> list[int]:
        """All token ids that were generated, the one that ended the text included."""
        return [*self.tokens, *self.end_tokens]


Output = tuple[Choice, GenerationResult]  # one finished choice


def best_outputs(outputs: Sequence[Output], choices: int, best: int) -> list[Output]:
    """Of each prompt's choices, which follow each other, the best by their mean logprob; equal ones in their order. All
    of them as they are if as many are wanted."""
    if best == choices:
        return list(outputs)
    prompts = [outputs[start : start + choices] for start in range(0, len(outputs), choices)]
    return [output for prompt in prompts for output in sorted(prompt, key=_mean_logprob, reverse=True)[:best]]


def _mean_logprob(output: Output) -> float:
    logprobs = [*output[0].logprobs, *output[0].end_logprobs]
    return sum(each.logprob for each in logprobs) / max(1, len(logprobs))


async def run_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. If one fails, the others are cancelled and its exception is raised.

    An asyncio.TaskGroup would do so, too, but has its exceptions refer to the frames that they have come through, and
    these to them: whatever the requests of a client that has left have held would wait for a full garbage collection.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left)
        tasks.clear()  # they have the exception, which has this frame


def positions(choice: Choice, result: GenerationResult) -> int:
    """How long it takes to put a choice into the response, in positions whose logprobs are in it. A text may have to be
    looked through for calls, and a prompt may be repeated."""
    logprobs = len(result.prompt_logprobs) + len(choice.logprobs)
    return logprobs + len(choice.text) // CHARS + result.usage.prompt_tokens // PROMPT_TOKENS


async def run_choices(
    completions: Completions,
    requests: Sequence[GenerationRequest],
    emit: EmitChoice,
    finished: Callable[[int, GenerationResult], Awaitable[None]],
) -> list[GenerationResult]:
    """Run requests concurrently. emit and finished get the position of the request. Raises the HeadraceError of the
    first one that fails, after cancelling the others."""

    async def run(index: int, request: GenerationRequest) -> GenerationResult:
        async def emit_one(event: Progress | GenerationDelta) -> None:
            await emit(index, event)

        result = await completions.complete(request, emit_one)
        await finished(index, result)
        return result

    return await run_all(run(index, request) for index, request in enumerate(requests))


async def collect_choices(completions: Completions, requests: Sequence[GenerationRequest]) -> list[Output]:
    """Run requests concurrently to their ends. Raises HeadraceError as run_choices() does."""
    choices = [Choice() for _ in requests]

    async def add(index: int, event: Progress | GenerationDelta) -> None:
        if isinstance(event, GenerationDelta):
            choices[index].add(event)

    async def finished(_index: int, _result: GenerationResult) -> None:
        pass

    return list(zip(choices, await run_choices(completions, requests, add, finished), strict=True))
