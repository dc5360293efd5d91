"""Hidden states in responses: nested lists of numbers as SGLang has them, or base64 of the elements as computed."""

import asyncio
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.core.types.requests.draft import DraftTokens, HiddenStates
from headrace.server.api.response.usage import Count

INLINE_BYTES = 1 << 14  # of states that are encoded on the event loop; more take a thread


class HiddenStatesReply(msgspec.Struct):
    """Of the prompt, from a position on: elements as computed, C-contiguous and little-endian in base64."""

    start: Count
    shape: list[int]
    dtype: str
    data: Any


class DraftReply(msgspec.Struct):
    """The most likely first tokens."""

    top_ids: tuple[int, ...]
    top_probs: tuple[float, ...]


async def nested_lists(states: HiddenStates, prompt_tokens: int) -> msgspec.Raw:
    """SGLang's meta_info.hidden_states: a list of the prompt's states, followed by that of each generated token whose
    state was computed."""
    return await _encoded(_nested, states, prompt_tokens)


async def base64_object(states: HiddenStates | None) -> HiddenStatesReply | None:
    """Dtype, shape and elements, C-contiguous and little-endian in base64; None for none."""
    if states is None:
        return None
    data = await _encoded(_base64, states, states.count)
    return HiddenStatesReply(states.start, [states.count, states.size], states.dtype, data)


def draft_object(draft: DraftTokens | None) -> DraftReply | None:
    """The most likely first tokens; None for none."""
    return None if draft is None else DraftReply(draft.ids, draft.probs)


async def _encoded(
    encode: Callable[[HiddenStates, int], bytes], states: HiddenStates, prompt_tokens: int
) -> msgspec.Raw:
    if len(states.data) <= INLINE_BYTES:
        return msgspec.Raw(encode(states, prompt_tokens))
    return msgspec.Raw(await asyncio.to_thread(encode, states, prompt_tokens))


def _nested(states: HiddenStates, prompt_tokens: int) -> bytes:
    """Row by row, so that the lists of Python numbers, eight times as large, are not in memory at the same time."""
    rows = [msgspec.json.encode(row.tolist()) for row in _float32(states)]
    prompt = b"[" + b",".join(rows[:prompt_tokens]) + b"]"
    return b"[" + b",".join([prompt, *rows[prompt_tokens:]]) + b"]"


def _base64(states: HiddenStates, _prompt_tokens: int) -> bytes:
    return b'"' + b64encode(states.data) + b'"'


def _float32(states: HiddenStates) -> NDArray[np.float32]:
    """[count, size]. Every element of a narrower dtype is a float32, too."""
    if states.dtype == "bfloat16":  # the upper half of a float32
        values = (np.frombuffer(states.data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(states.data, "<f4" if states.dtype == "float32" else "<f2").astype(np.float32)
    return values.reshape(-1, states.size)
