"""Scores of many items: the logprobs of label tokens at the end of each prompt. What their prompts have in common is
computed once.

item 0   Submit ──► Progress: the shared prefix is computed, and in the prefix cache ──► its labels
item 1                         └─► Submit ──► its labels
item 2                         └─► Submit ──► its labels

Each is an ordinary request: pages behind the shared prefix end with it, and the cache gets none of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from headrace.core.messages.replies import Progress
from headrace.core.types.errors import HeadraceError
from headrace.core.types.requests.request import SamplingParams, Usage
from headrace.server.api.response.choices import run_all
from headrace.server.frontend.generation.completions import Completions
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationRequest

OPEN_ITEMS = 256
"""Items of a body that the scheduler has at the same time: several passes of them, and no more of its queue."""


class ScoredItem(msgspec.Struct, frozen=True):
    """One prompt to score."""

    place: str
    """Its name in errors."""
    prompt: tuple[int, ...]
    labels: tuple[int, ...]
    """Token ids."""


class ItemScore(msgspec.Struct, frozen=True):
    """What the model says of one item."""

    logprobs: tuple[float, ...]
    """Of its labels, among all tokens of the vocabulary."""
    usage: Usage


def shared_tokens(head: Sequence[int], items: Sequence[ScoredItem], page_size: int) -> int:
    """Tokens in whole pages with which all prompts begin, and the head: what is known to be common to them, whatever
    the items are."""
    prompts = [tuple(head), *(item.prompt for item in items)]
    first, last = min(prompts), max(prompts)  # what these two have in common, all between them have
    pairs = enumerate(zip(first, last, strict=False))
    common = next((at for at, (one, other) in pairs if one != other), len(first))
    return common - common % page_size


async def score_items(
    completions: Completions, base: GenerationRequest, items: Sequence[ScoredItem], shared: int
) -> list[ItemScore]:
    """Score items, of which so many tokens are shared. base: what their requests have in common. Raises HeadraceError,
    which names the item, as soon as one fails; the others are cancelled then, as they are with this coroutine."""
    terms = msgspec.structs.replace(base.terms, keep_tokens=shared)
    published, places = asyncio.Event(), asyncio.Semaphore(OPEN_ITEMS)

    async def watch(event: Progress | GenerationDelta) -> None:
        if isinstance(event, Progress) and event.phase == "computing" and event.done >= shared:
            published.set()

    async def score(index: int, item: ScoredItem) -> ItemScore:
        if index:
            await published.wait()
        async with places:
            request = msgspec.structs.replace(
                base, rid=f"{base.rid}-{index}", prompt=item.prompt, sampling=_sampling(item), terms=terms,
                progress=not index,
            )  # fmt: skip
            found = await _score(completions, request, item, watch)
        published.set()
        return found

    if not shared:
        published.set()
    return await run_all(score(index, item) for index, item in enumerate(items))


def _sampling(item: ScoredItem) -> SamplingParams:
    """Nothing is drawn: the most likely token is found with the check of the logits, and is not asked for."""
    return SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, label_token_ids=item.labels)


async def _score(
    completions: Completions,
    request: GenerationRequest,
    item: ScoredItem,
    emit: Callable[[Progress | GenerationDelta], Awaitable[None]],
) -> ItemScore:
    try:
        first, result = await completions.prefill(request, emit)
    except HeadraceError as error:
        field = item.place if error.info.field == "prompt" else error.info.field
        message = f"{item.place}: {error.info.message}"
        raise HeadraceError(msgspec.structs.replace(error.info, message=message, field=field)) from error
    return ItemScore(first.logprobs[0].top_logprobs, result.usage)
