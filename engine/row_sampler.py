"""Samples tokens for the rows of a plan, and computes prompt logprobs, from the hidden states after the last layer."""

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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
from headrace.engine.kv.device_copies import begin_copy, place, select_rows
from headrace.engine.layers.vocabulary import Best
from headrace.engine.sampling.adjusted import LogitAdjustments
from headrace.engine.sampling.constrained import accept_tokens, mask_logits
from headrace.engine.sampling.logprobs import draft_tokens, no_logprobs, prompt_logprobs, sampled_logprobs
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


class FedTokens(NamedTuple):
    """Sampled tokens on the device, for rows of later plans."""

    places: dict[int, int]
    """By request, where its token is."""
    tokens: Tensor
    """int64; NO_TOKEN where there is none."""

    def of(self, requests: Sequence[int]) -> Tensor:
        """Tokens of these requests, int64 [requests]: PLACEHOLDER where there is none."""
        return select_rows(self.tokens, [self.places[request] for request in requests]).clamp(min=PLACEHOLDER)


class Sampling:
    """The sampling of a plan: queued on the device, and finished by result()."""

    def __init__(self, fed: FedTokens, finish: "Callable[[Sampling], None]") -> None:
        """fed: the tokens of rows that sample; none on shards that do not. finish: sets outcome, when the device is
        done."""
        self.fed = fed
        self.outcome: PlanResult | None = None
        """The result, once it is finished."""
        self.released: set[int] = set()
        """Requests that have ended before."""
        self._finish = finish
        self._ended: torch.cuda.Event | None = None
        if fed.tokens.device.type == "cuda":
            self._ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._ended.record(torch.cuda.current_stream(fed.tokens.device))

    def wait(self) -> None:
        """Wait for the device."""
        if self._ended is not None:
            self._ended.synchronize()

    def result(self) -> PlanResult:
        """The result; waits for the device if it is not done. Any thread."""
        self.wait()
        self._finish(self)
        assert self.outcome is not None
        return self.outcome


class _Drawn(NamedTuple):
    """Tokens that were drawn for rows, and what is read with them when they are in host memory."""

    rows: Sequence[PlanRow]
    tokens: Tensor
    on_host: Tensor
    logprobs: Callable[[Sequence[int]], Sequence[TokenLogprob | None]]
    drafts: Callable[[Sequence[int]], Sequence[DraftTokens | None]]
    rejected: dict[int, str]
    """Requests whose grammar gives no mask."""


class RowSampler:
    """Sampling on one shard of the last stage. All shards call sample() for the same rows; the first one samples.

    On a GPU nothing waits for what was sampled: tokens stay there for the next plans, and a plan's result is finished
    when the device is done with it, for the first thread that asks. Only a row whose constraint or penalties follow
    from tokens before it has the compute thread wait for those.
    """

    def __init__(self, head: Head, shard: int, shards: int, compiler: Callable[[], GrammarCompiler]) -> None:
        """head: of the model. shard: this one's number, of so many. compiler: of constraints."""
        self._head = head
        self._samples = shard == 0
        self._gathers = shards > 1
        self._sampler = Sampler(random.SystemRandom())
        self._grammars = GrammarStates(compiler)
        self._adjustments = LogitAdjustments()
        self._last: dict[int, int] = {}  # request → its last sampled token
        self._on_device: dict[int, FedTokens] = {}  # request → where that is while the host does not know it
        self._pending: deque[tuple[Sampling, Callable[[], PlanResult]]] = deque()  # not finished, the oldest first
        self._lock = threading.RLock()  # results are finished by another thread than the one that computes

    def feed(self, fed: FedTokens) -> None:
        """Take tokens sampled elsewhere."""
        with self._lock:
            if fed.tokens.device.type == "cpu":
                tokens = fed.tokens.tolist()
                self._last.update((request, tokens[place]) for request, place in fed.places.items())
            else:
                self._on_device.update(dict.fromkeys(fed.places, fed))

    def last(self, request: int) -> int | None:
        """The token sampled last for a request, where the host knows it."""
        return self._last.get(request)

    def token_ids(self, rows: Sequence[PlanRow], device: torch.device) -> Tensor:
        """Token ids of rows, int64 [tokens] on the device: those that rows bring, and those sampled last. Raises
        ValueError for a row whose tokens do not cover its positions."""
        ends = np.cumsum([row.count for row in rows]).tolist()
        with self._lock:
            late = {
                end - 1: (row.request, self._on_device[row.request])
                for row, end in zip(rows, ends, strict=True)
                if not row.tokens and row.request in self._on_device
            }
            known = (PLACEHOLDER if row.request in self._on_device else self._last.get(row.request) for row in rows)
            ids = np.concatenate([row_ids(row, last) for row, last in zip(rows, known, strict=True)])
        placed = place(ids.astype(np.int64), device)
        for fed in {id(fed): fed for _, fed in late.values()}.values():
            at = {position: request for position, (request, each) in late.items() if each is fed}
            placed.index_copy_(0, place(np.array(list(at), np.int64), device), fed.of(list(at.values())))
        return placed

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """Before the forward pass of rows: their constraints are compiled beside it."""
        if self._samples:
            with self._lock:
                self._grammars.begin(rows)

    def release(self, request: int) -> None:
        """Drop what is kept for a request; unknown requests are ignored."""
        with self._lock:
            self._last.pop(request, None)
            self._on_device.pop(request, None)
            self._grammars.release(request)
            self._adjustments.release(request)
            for sampling, _ in self._pending:
                sampling.released.add(request)

    def sample(self, rows: Sequence[PlanRow], hidden: Tensor) -> Sampling:
        """Sample for rows. hidden: states [tokens, hidden size] after the last layer. Results are in the order of rows;
        they are empty on shards other than the first, which take part in the gathers of logits.

        A row is nonfinite by the logits of its last position, or by its hidden state if it is not sampled. That
        position attends to all positions before it, so a NaN anywhere in their KV, on any stage, shows there.
        """
        ends = np.cumsum([row.count for row in rows]).tolist()
        with self._lock, torch.inference_mode():
            self._catch_up(rows)
            drawn = self._draw(rows, ends, hidden)
            chunks = self._nonfinite_chunks(rows, ends, hidden)
            logprobs, states = self._prompt_logprobs(rows, ends, hidden), self._hidden_states(rows, ends, hidden)
            tokens = drawn.tokens if drawn is not None else torch.empty(0, dtype=torch.int64, device=hidden.device)
            sampled = drawn.rows if drawn is not None else ()
            fed = FedTokens({row.request: place for place, row in enumerate(sampled)}, tokens)
            sampling = Sampling(fed, self._finish_until)
            self._pending.append((sampling, lambda: self._read(drawn, sampling.released, chunks, logprobs, states)))
            if hidden.device.type == "cpu":
                sampling.result()
            else:
                self.feed(fed)
            return sampling

    def _catch_up(self, rows: Sequence[PlanRow]) -> None:
        """Have the results that constraints and penalties of rows go on from."""
        depend = {row.request for row in rows if row.sample and (row.sample.grammar or row.sample.penalizes)}
        late = [sampling for sampling, _ in self._pending if depend.intersection(sampling.fed.places)]
        if late:
            late[-1].result()

    def _finish_until(self, sampling: Sampling) -> None:
        """Finish this sampling, and those before it first."""
        with self._lock:
            while sampling.outcome is None:
                oldest, read = self._pending.popleft()
                if oldest is not sampling:
                    oldest.wait()
                oldest.outcome = read()

    def _read(
        self,
        drawn: _Drawn | None,
        released: set[int],
        chunks: Callable[[], list[int]],
        logprobs: Sequence[Callable[[], PromptLogprobs]],
        states: Sequence[Callable[[], RowHidden]],
    ) -> PlanResult:
        """The result of a plan that the device is done with. released: requests that have ended. chunks: reads
        those of nonfinite rows that are not sampled."""
        samples, nonfinite, rejected = self._accept(drawn, released) if drawn is not None else ([], [], [])
        return PlanResult(
            samples,
            [read() for read in logprobs],
            nonfinite + chunks(),
            tuple(rejected),
            tuple(read() for read in states),
        )

    def _accept(
        self, drawn: _Drawn, released: set[int]
    ) -> tuple[list[SampledToken], list[int], list[GrammarRejection]]:
        """Samples, the requests of rows whose logits are not finite, and those whose grammar cannot go on."""
        tokens = drawn.on_host.tolist()
        requests = [row.request for row in drawn.rows]
        samples, nonfinite = _split_samples(requests, tokens, drawn.logprobs(tokens), drawn.drafts(tokens))
        going_on = [sampled for sampled in samples if sampled.request not in released]
        samples, rejections = accept_tokens(going_on, drawn.rejected, self._grammars)
        self._adjustments.accept(samples)
        known = {sampled.request: sampled.token for sampled in samples}
        known.update(dict.fromkeys((*nonfinite, *drawn.rejected), PLACEHOLDER))
        self._last.update((request, token) for request, token in known.items() if request not in released)
        for request in requests:
            if request in self._on_device and self._on_device[request].tokens is drawn.tokens:
                del self._on_device[request]
        return samples, nonfinite, rejections

    def _draw(self, rows: Sequence[PlanRow], ends: list[int], hidden: Tensor) -> _Drawn | None:
        """A token for each row that samples, NO_TOKEN if its logits are not finite, and the logprobs and draft data
        that it asks for; None without such rows, and on shards other than the first."""
        asked = [(row, end) for row, end in zip(rows, ends, strict=True) if row.sample is not None]
        if not asked:
            return None
        of = [row for row, _ in asked]
        hidden = select_rows(hidden, [end - 1 for _, end in asked])
        wanted = [SampleRow(row.sample, row.start + row.count, row.generated) for row in of if row.sample is not None]
        top_k = [row.draft_top_k for row in of]
        if self._gathers and not needs_logits(wanted) and not any(top_k):
            tokens = greedy_tokens(*self._head.best(hidden))
            return _Drawn(of, tokens, begin_copy(tokens), no_logprobs, no_logprobs, {}) if self._samples else None
        logits = self._head.logits(hidden)
        if not self._samples:
            return None
        rejected: dict[int, str] = {}
        if any(row.params.grammar for row in wanted):
            wanted, rejected = mask_logits(logits, of, self._grammars)
        tokens = self._sampler.sample(self._adjustments.adjust(logits, of), wanted)
        logprobs = sampled_logprobs(logits, tokens, [row.params for row in wanted])
        return _Drawn(of, tokens, begin_copy(tokens), logprobs, draft_tokens(logits, top_k), rejected)

    def _nonfinite_chunks(self, rows: Sequence[PlanRow], ends: list[int], hidden: Tensor) -> Callable[[], list[int]]:
        """What reads the requests of rows that are not sampled and whose hidden states are not finite; none on shards
        other than the first."""
        chunks = [(row.request, end - 1) for row, end in zip(rows, ends, strict=True) if row.sample is None]
        if not chunks or not self._samples:
            return list
        requests, last = zip(*chunks, strict=True)
        finite = begin_copy(select_rows(hidden, last).isfinite().all(dim=-1))
        return lambda: [request for request, good in zip(requests, finite.tolist(), strict=True) if not good]

    def _hidden_states(self, rows: Sequence[PlanRow], ends: list[int], hidden: Tensor) -> list[Callable[[], RowHidden]]:
        """What reads the hidden states that rows ask for; none on shards other than the first, though all have them."""
        if not self._samples:
            return []
        return [
            partial(_reported_states, row, begin_copy(self._head.normed(hidden[end - row.hidden : end]).contiguous()))
            for row, end in zip(rows, ends, strict=True)
            if row.hidden
        ]

    def _prompt_logprobs(
        self, rows: Sequence[PlanRow], ends: list[int], hidden: Tensor
    ) -> list[Callable[[], PromptLogprobs]]:
        """What reads the prompt logprobs that rows ask for."""
        results: list[Callable[[], PromptLogprobs]] = []
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
            results.append(partial(_reported_logprobs, row.request, first, entries))
        return results


def row_ids(row: PlanRow, last: int | None) -> NDArray[np.int32]:
    """Token ids of a row: int32 [count]. last: the token sampled last for its request. Raises ValueError for a row
    whose tokens do not cover its positions."""
    if not row.tokens:
        if row.count != 1 or last is None:
            raise ValueError(f"request {row.request} has no tokens for {row.count} positions at {row.start}")
        return np.array([last], dtype=np.int32)
    ids = np.frombuffer(row.tokens, dtype="<i4")
    if len(ids) != row.count or row.count < 1:
        raise ValueError(f"request {row.request} has {len(ids)} tokens for {row.count} positions at {row.start}")
    return ids


def _reported_logprobs(request: int, first: int, entries: Callable[[], list[TokenLogprob]]) -> PromptLogprobs:
    return PromptLogprobs(request, pack_runs(first, entries()))


def _reported_states(row: PlanRow, last: Tensor) -> RowHidden:
    """What a stage reports of a row that asks for hidden states. last: those of its last positions, [row.hidden, hidden
    size] in host memory."""
    dtype = DTYPE_NAMES[last.dtype]
    states = last.view(torch.uint8).numpy()
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
