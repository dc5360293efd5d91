"""Biases and penalties: logits that are changed by what a request says and by the tokens that it has seen.

In vLLM's order: logit_bias is added; then logits of tokens of the prompt and of generated ones are divided by
repetition_penalty (negative ones multiplied, arXiv 1909.05858); then frequency_penalty is subtracted as often as a
token was generated, and presence_penalty once. Only the tokens concerned are touched, and each by itself, so that a row
does not depend on the rows beside it.

Kept for each request with penalties: twelve bytes for each distinct token of its prompt, and a little more for each
generated one.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.core.messages.stage_events import SampledToken
from headrace.core.types import packed
from headrace.core.types.requests.request import SamplingParams, TokenHistory
from headrace.engine.kv.device_copies import place

ROOM = 64  # generated tokens for which there is room to begin with; it doubles


class SeenTokens:
    """The distinct tokens of a request, and how often each of them was generated."""

    def __init__(self, history: TokenHistory) -> None:
        prompt = np.unique(np.frombuffer(history.prompt, dtype="<i4"))
        self._prompt = self._size = len(prompt)
        self._ids = np.empty(self._size + ROOM, np.int64)
        self._ids[: self._size] = prompt  # sorted; generated ones follow in the order in which they came
        self._counts = np.zeros(len(self._ids), np.float32)
        self._places: dict[int, int] = {}  # generated token → where it is in these
        for token in packed.unpack(history.generated):
            self.add(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The tokens: [distinct]."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each was generated, 0 for one of the prompt alone: [distinct]."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """A token was generated."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._new_place(token)
        self._counts[place] += 1

    def _new_place(self, token: int) -> int:
        found = int(np.searchsorted(self._ids[: self._prompt], token))
        if found < self._prompt and self._ids[found] == token:
            return found
        if self._size == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[self._size] = token
        self._size += 1
        return self._size - 1


class _Bias:
    """What is added to some logits."""

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self.ids = np.array([token for token, _ in biases], np.int64)
        self.values = np.array([value for _, value in biases], np.float32)


class LogitAdjustments:
    """The biases and penalties of the requests that one sampler has. Used by the compute thread alone."""

    def __init__(self) -> None:
        self._seen: dict[int, SeenTokens] = {}
        self._biases: dict[int, _Bias] = {}

    def adjust(self, logits: Tensor, rows: Sequence[PlanRow]) -> Tensor:
        """Logits from which the tokens of rows are chosen: the given ones where no row asks for others. logits: float32
        [rows, vocabulary], not modified."""
        asked = [
            (index, row, row.sample)
            for index, row in enumerate(rows)
            if row.sample is not None and row.sample.adjusts_logits
        ]
        if not asked:
            return logits
        width = logits.shape[-1]
        adjusted = logits.clone(memory_format=torch.contiguous_format)
        biases = [(index * width, self._bias(row, params)) for index, row, params in asked if params.logit_bias]
        if biases:
            places = np.concatenate([start + bias.ids for start, bias in biases])
            added = place(np.concatenate([bias.values for _, bias in biases]), logits.device)
            _change(adjusted, places, lambda values: values + added)
        seen = [(index * width, self._seen_by(row), params) for index, row, params in asked if params.penalizes]
        if seen:
            places = np.concatenate([start + tokens.ids for start, tokens, _ in seen])
            _change(adjusted, places, _penalties(logits, [(tokens, params) for _, tokens, params in seen]))
        return adjusted

    def accept(self, samples: Iterable[SampledToken]) -> None:
        """Tokens were sampled."""
        if self._seen:
            for sampled in samples:
                if (seen := self._seen.get(sampled.request)) is not None:
                    seen.add(sampled.token)

    def release(self, request: int) -> None:
        """Drop what is kept for a request; unknown requests are ignored."""
        self._seen.pop(request, None)
        self._biases.pop(request, None)

    def _bias(self, row: PlanRow, params: SamplingParams) -> _Bias:
        if row.request not in self._biases:
            self._biases[row.request] = _Bias(params.logit_bias)
        return self._biases[row.request]

    def _seen_by(self, row: PlanRow) -> SeenTokens:
        if row.history is not None:
            self._seen[row.request] = SeenTokens(row.history)
        return self._seen[row.request]


def _penalties(logits: Tensor, seen: Sequence[tuple[SeenTokens, SamplingParams]]) -> Callable[[Tensor], Tensor]:
    """Maps the logits of all seen tokens, row by row, to the penalized ones."""
    sizes = [len(tokens.ids) for tokens, _ in seen]

    def each(values: Sequence[float]) -> Tensor:
        return place(np.repeat(np.array(values, np.float32), sizes), logits.device)

    counts = place(np.concatenate([tokens.counts for tokens, _ in seen]), logits.device)
    repetition = each([params.repetition_penalty for _, params in seen])
    frequency = each([params.frequency_penalty for _, params in seen])
    presence = each([params.presence_penalty for _, params in seen])

    def penalized(values: Tensor) -> Tensor:
        values = torch.where(values > 0, values / repetition, values * repetition)
        return values - frequency * counts - presence * (counts > 0)

    return penalized


def _change(logits: Tensor, places: NDArray[np.int64], change: Callable[[Tensor], Tensor]) -> None:
    """Replace the values at places of the flat logits, which differ from each other."""
    flat, at = logits.view(-1), place(places, logits.device)
    flat[at] = change(flat[at])
