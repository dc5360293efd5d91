"""Samples tokens for the rows of a plan, and computes prompt logprobs, from the hidden states after the last layer."""

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.core.messages.stage_events import PromptLogprobs, RowHidden, SampledToken
from headrace.core.types.requests.constraint import GrammarRejection
from headrace.core.types.requests.draft import DraftTokens, HiddenStates
from headrace.core.types.requests.prompt_logprobs import pack_runs
from headrace.core.types.requests.request import TokenLogprob
from headrace.engine.dtypes import DTYPE_NAMES
from headrace.engine.grammar.compiler import GrammarCompiler
from headrace.engine.grammar.states import GrammarStates
from headrace.engine.kv.device_copies import select_rows
from headrace.engine.layers.vocabulary import Best
from headrace.engine.sampling.adjusted import LogitAdjustments
from headrace.engine.sampling.constrained import accept_tokens, mask_logits
from headrace.engine.sampling.logprobs import draft_tokens, prompt_logprobs, wanted_logprobs
from headrace.engine.sampling.sampler import NO_TOKEN, Sampler, SampleRow, greedy_tokens, needs_logits

PLACEHOLDER = 0  # in place of the token of a nonfinite row, for rows of its request that are planned already


class PlanResult(NamedTuple):
    """The result of a plan on the last stage; empty on its shards other than the first."""

    samples: list[SampledToken]
    """In the order of the rows that sample; none for nonfinite rows."""

    prompt_logprobs: list[PromptLogprobs]
    """In the order of the rows that ask for them."""

    nonfinite: list[int]
    """Requests whose rows came out NaN or infinite."""

    rejected: tuple[GrammarRejection, ...] = ()
    """Requests whose grammar cannot go on; they have no sample."""

    hidden: tuple[RowHidden, ...] = ()
    """In the order of the rows that ask for them."""


class Head(Protocol):
    """The output head of a model, see Decoder."""

    def logits(self, hidden: Tensor) -> Tensor:
        """States after the last layer [rows, hidden size] → float32 logits [rows, vocabulary]."""
        ...

    def best(self, hidden: Tensor) -> Best:
        """The largest logits of such states."""
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Such states as requests get them that ask for hidden states."""
        ...


class RowSampler:
    """Sampling on one shard of the last stage. All shards call sample() for the same rows; the first one samples."""

    def __init__(self, head: Head, shard: int, shards: int, compiler: Callable[[], GrammarCompiler]) -> None:
        """head: of the model. shard: this one's number, of so many. compiler: of constraints."""
        self._head = head
        self._samples = shard == 0
        self._gathers = shards > 1
        self._sampler = Sampler(random.SystemRandom())
        self._grammars = GrammarStates(compiler)
        self._adjustments = LogitAdjustments()
        self._last: dict[int, int] = {}  # request → its last sampled token

    def feed(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Take (request, token) pairs sampled elsewhere."""
        self._last.update(tokens)

    def last(self, request: int) -> int | None:
        """The token sampled last for a request."""
        return self._last.get(request)

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """Before the forward pass of rows: their constraints are compiled beside it."""
        if self._samples:
            self._grammars.begin(rows)

    def release(self, request: int) -> None:
        """Drop what is kept for a request; unknown requests are ignored."""
        self._last.pop(request, None)
        self._grammars.release(request)
        self._adjustments.release(request)

    def sample(self, rows: Sequence[PlanRow], hidden: Tensor) -> PlanResult:
        """Results of rows, in their order. hidden: states [tokens, hidden size] after the last layer. Empty on shards
        other than the first, which take part in the gathers of logits.

        A row is nonfinite by the logits of its last position, or by its hidden state if it is not sampled. That
        position attends to all positions before it, so a NaN anywhere in their KV, on any stage, shows there.
        """
        ends = np.cumsum([row.count for row in rows]).tolist()
        with torch.inference_mode():
            samples, nonfinite, rejected = self._sample(rows, ends, hidden)
            nonfinite += self._nonfinite_chunks(rows, ends, hidden)
            logprobs, states = self._prompt_logprobs(rows, ends, hidden), self._hidden_states(rows, ends, hidden)
            return PlanResult(samples, logprobs, nonfinite, tuple(rejected), states)

    def _sample(
        self, rows: Sequence[PlanRow], ends: list[int], hidden: Tensor
    ) -> tuple[list[SampledToken], list[int], list[GrammarRejection]]:
        """Samples, the requests of rows whose logits are not finite, and those whose grammar cannot go on."""
        asked = [(row, end) for row, end in zip(rows, ends, strict=True) if row.sample is not None]
        if not asked:
            return [], [], []
        of = [row for row, _ in asked]
        tokens, logprobs, drafts, rejected = self._draw(select_rows(hidden, [end - 1 for _, end in asked]), of)
        if not self._samples:
            return [], [], []
        samples, nonfinite = _split_samples([row.request for row in of], tokens, logprobs, drafts)
        samples, rejections = accept_tokens(samples, rejected, self._grammars)
        self._adjustments.accept(samples)
        self._last.update((sampled.request, sampled.token) for sampled in samples)
        self._last.update(dict.fromkeys((*nonfinite, *rejected), PLACEHOLDER))
        return samples, nonfinite, rejections

    def _draw(
        self, hidden: Tensor, rows: Sequence[PlanRow]
    ) -> tuple[list[int], list[TokenLogprob | None], list[DraftTokens | None], dict[int, str]]:
        """A token per row, NO_TOKEN if its logits are not finite, the logprobs and draft data it asks for, and the
        requests whose grammar gives no mask; none on shards other than the first. hidden: states of the rows [rows,
        hidden size]."""
        wanted = [SampleRow(row.sample, row.start + row.count, row.generated) for row in rows if row.sample is not None]
        top_k = [row.draft_top_k for row in rows]
        if self._gathers and not needs_logits(wanted) and not any(top_k):
            return greedy_tokens(*self._head.best(hidden)), [None] * len(rows), [None] * len(rows), {}
        logits = self._head.logits(hidden)
        if not self._samples:
            return [], [], [], {}
        rejected: dict[int, str] = {}
        if any(row.params.grammar for row in wanted):
            wanted, rejected = mask_logits(logits, rows, self._grammars)
        tokens = self._sampler.sample(self._adjustments.adjust(logits, rows), wanted)
        logprobs = wanted_logprobs(logits, tokens, [row.params.logprobs for row in wanted])
        return tokens, logprobs, draft_tokens(logits, tokens, top_k), rejected

    def _nonfinite_chunks(self, rows: Sequence[PlanRow], ends: list[int], hidden: Tensor) -> list[int]:
        """Requests of rows that are not sampled and whose hidden states are not finite.

        CPU only: on a GPU the copy to the host would have to be waited for. There the NaN is found when the request is
        sampled.
        """
        chunks = [(row, end) for row, end in zip(rows, ends, strict=True) if row.sample is None]
        if not chunks or not self._samples or hidden.device.type != "cpu":
            return []
        finite = select_rows(hidden, [end - 1 for _, end in chunks]).isfinite().all(dim=-1).tolist()
        return [row.request for (row, _), good in zip(chunks, finite, strict=True) if not good]

    def _hidden_states(self, rows: Sequence[PlanRow], ends: list[int], hidden: Tensor) -> tuple[RowHidden, ...]:
        """The hidden states that rows ask for; none on shards other than the first, though all have them."""
        if not self._samples:
            return ()
        return tuple(
            reported_states(row, self._head.normed(hidden[end - row.hidden : end]))
            for row, end in zip(rows, ends, strict=True)
            if row.hidden
        )

    def _prompt_logprobs(self, rows: Sequence[PlanRow], ends: list[int], hidden: Tensor) -> list[PromptLogprobs]:
        results = []
        for row, end in zip(rows, ends, strict=True):
            if row.prompt_logprobs is None:
                continue
            first, targets = row.prompt_targets()
            rows_of = hidden[end - row.count :][first - row.start - 1 :][: len(targets)]
            if not self._samples:
                if targets:
                    self._head.logits(rows_of)  # gathered in the slices in which prompt_logprobs() asks for them
                continue
            entries = prompt_logprobs(rows_of, targets, row.prompt_logprobs, self._head.logits)
            results.append(PromptLogprobs(row.request, pack_runs(first, entries)))
        return results


def reported_states(row: PlanRow, last: Tensor) -> RowHidden:
    """What a stage reports of a row that asks for hidden states. last: those of its last positions, [row.hidden, hidden
    size]."""
    dtype = DTYPE_NAMES[last.dtype]
    states = last.contiguous().cpu().view(torch.uint8).numpy()
    if sys.byteorder == "big":
        states = states.reshape(-1, last.element_size())[:, ::-1]
    start = row.start + row.count - row.hidden
    return RowHidden(row.request, HiddenStates(start, last.shape[1], dtype, states.tobytes()))


def _split_samples(
    requests: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    drafts: Sequence[DraftTokens | None],
) -> tuple[list[SampledToken], list[int]]:
    """The samples of rows that have a token, and the requests of rows that have none."""
    entries = list(zip(requests, tokens, logprobs, drafts, strict=True))
    samples = [SampledToken(*entry) for entry in entries if entry[1] != NO_TOKEN]
    return samples, [request for request, token, *_ in entries if token == NO_TOKEN]
