"""CUDA graphs of the layers of a pass: one launch for all that is between two calls of attention.

    embedding ──► graph 0: norm, q k v, heads placed ──► attend ──► graph 1: output, MLP, norm, q k v, heads placed ──►
    attend ──► … ──► graph n: output, MLP

What attention does follows from the lengths of rows, so it stays outside. So do sums over shards, of which the host has
to know (collectives/graphed.py): the output and the MLP end a graph each. Shards sum the rows of a pass without its
padding, whether they have graphs or not. A graph is of a number of tokens: a pass
takes those of the least size that holds it (engine/model/graph_sizes.py). Rows behind its own are padding. They have no
slot in the pool, go to no expert, and no row attends to them, so that a row has the values that it would have in a
pass of so many rows without graphs; which kernel multiplies, and so how sums are rounded, may depend on the size.

The layers are captured by running them: where they call attention or begin a sum, one graph ends and the next begins.
So what they compute is written down once. Between graphs and what is between them are fixed buffers, the same for all
sizes. Everything else is in a memory pool that all graphs share: those of one size hand tensors on to each other, and
are replayed in their order and with no others among them. All of it is used on one stream.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.attention.paged import Attention, AttentionPass, AttentionSpan, write_padded
from headrace.engine.collectives.graphed import GraphedCollectives
from headrace.engine.collectives.operations import LinkBroken, least
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import KvSlots
from headrace.engine.model.graph_sizes import graph_sizes

log = logging.getLogger(__name__)
CAPTURE_S = 120.0  # after which no further size is begun
TOLERANCE = 0.1  # norm of what a trial may differ by, as a share: wrong values differ by more than 1


class Layers(Protocol):
    """The layers of a stage, as they are captured."""

    def __call__(self, hidden: Tensor, positions: Tensor, attention: AttentionPass, padding: Tensor | None) -> None:
        """Run them over hidden states [tokens, hidden size], in place, at positions int64 [tokens]. padding: bool
        [tokens, 1], which rows go to no expert; None where all are a pass's own."""
        ...


class StageForm(NamedTuple):
    """Shapes of a stage, on one device."""

    hidden: int
    heads: int
    """Of this shard."""
    head_dim: int
    """Of queries."""
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    positions: int
    """Of the longest sequence."""


class Buffers(NamedTuple):
    """What graphs and attention exchange, at addresses that never change."""

    hidden: Tensor
    """[tokens, hidden size]"""
    positions: Tensor
    """int64 [tokens]"""
    first: Tensor
    """int64 [tokens]: see KvSlots; -1 for padding."""
    query: Tensor
    """[tokens, heads, head_dim]: what attention reads."""
    attended: Tensor
    """[tokens, heads, value_dim]: where its result is put."""
    summed: Tensor
    """[tokens, hidden size]: what is summed over shards; no tokens where there is one."""

    def rows(self, tokens: slice) -> "Buffers":
        """Views of the rows of these tokens."""
        return Buffers(*(each[tokens] for each in self))


Between = Callable[[AttentionPass, Buffers], None]
"""What is done between two graphs, for the rows of a pass in the buffers."""


class Captured(NamedTuple):
    """Graphs of one size, and what is done between them."""

    graphs: Sequence[torch.cuda.CUDAGraph]
    between: Sequence[Between]
    """One less."""


def make_buffers(tokens: int, form: StageForm, *, shards: bool) -> Buffers:
    """Buffers for so many tokens, full of padding. shards: with room for sums."""
    wide: dict[str, Any] = {"dtype": form.dtype, "device": form.device}
    return Buffers(
        torch.zeros(tokens, form.hidden, **wide),
        torch.zeros(tokens, dtype=torch.int64, device=form.device),
        torch.full((tokens,), -1, dtype=torch.int64, device=form.device),
        torch.zeros(tokens, form.heads, form.head_dim, **wide),
        torch.zeros(tokens, form.heads, form.value_dim, **wide),
        torch.zeros(tokens if shards else 0, form.hidden, **wide),
    )


class PassGraphs:
    """Graphs of passes of several sizes. Used by one thread, on its current stream."""

    def __init__(
        self,
        layers: Layers,
        form: StageForm,
        pool: KVPool,
        sizes: Sequence[int],
        step: Callable[[], None],
        tp: GraphedCollectives | None = None,
    ) -> None:
        """Allocate the buffers. sizes: ascending. step: called for each graph that is replayed. tp: the shards, which
        capture the same; None for one."""
        self._layers, self._form, self._pool, self._sizes, self._step = layers, form, pool, tuple(sizes), step
        self._tp = tp
        self._buffers = make_buffers(sizes[-1], form, shards=tp is not None)
        self._graphs: dict[int, Captured] = {}

    def capture(self, attention: Attention) -> None:
        """Capture graphs of all sizes, the largest first, as far as the time goes, and try them. Pages of the pool are
        overwritten. attention: without graphs. Shards have graphs of the same sizes. Raises RuntimeError for a trial
        that fails, here or on another shard, what capturing raises, and LinkBroken when a shard is gone."""
        began = time.monotonic()
        memory = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream(self._form.device)  # type: ignore[no-untyped-call]
        for number, size in enumerate(reversed(self._sizes)):
            if not self._agreed(time.monotonic() - began <= CAPTURE_S):
                log.warning("passes of up to %d tokens run without CUDA graphs: %.0f s have passed", size, CAPTURE_S)
                break
            self._graphs[size] = self._captured_everywhere(size, memory, stream)
            self._try(size, attention)
            log.info("CUDA graphs of %d tokens captured, %d of %d sizes", size, number + 1, len(self._sizes))
        torch.cuda.empty_cache()  # what ran on the other stream
        graphs = sum(len(captured.graphs) for captured in self._graphs.values())
        log.info("%d CUDA graphs were captured in %.1f s", graphs, time.monotonic() - began)

    def holds(self, tokens: int) -> bool:
        """Whether a pass of so many tokens has graphs."""
        return tokens <= self._sizes[-1] and self._size(tokens) in self._graphs

    def run(self, hidden: Tensor, positions: Tensor, attention: AttentionPass) -> Tensor:
        """Run the layers over a pass that holds() knows: hidden states [tokens, hidden size] → the same. hidden is left
        as it is. attention: of the pass."""
        count = len(hidden)
        graphs, between = self._graphs[size := self._size(count)]
        rows = self._buffers.rows(slice(0, count))
        self._place(hidden, positions, attention, size)
        for graph, then in zip_longest(graphs, between):
            self._step()
            graph.replay()
            if then is not None:
                then(attention, rows)
        return rows.hidden.clone()  # the next pass overwrites it, which may be queued before this result is read

    def _size(self, tokens: int) -> int:
        return next(size for size in self._sizes if size >= tokens)

    def _place(self, hidden: Tensor, positions: Tensor, attention: AttentionPass, size: int) -> None:
        """Put a pass into the buffers. Padding behind it is what passes before have left there, without slots."""
        slots = attention.slots(0)
        assert slots is not None, "attention on GPUs leaves keys and values to the layers"
        count = len(hidden)
        rows = self._buffers.rows(slice(0, count))
        rows.hidden.copy_(hidden)
        rows.positions.copy_(positions)
        rows.first.copy_(slots.first)
        if count < size:
            self._buffers.first[count:size].fill_(-1)

    def _agreed(self, well: bool) -> bool:
        """Whether it is so on all shards. Raises LinkBroken when one is gone."""
        return well if self._tp is None else least(self._tp, int(well), str(self._form.device)) == 1

    def _captured_everywhere(self, size: int, memory: Any, stream: Any) -> Captured:
        """The graphs of a size. Raises what capturing raises, and RuntimeError where it fails on another shard."""
        made, failed = None, None
        try:
            made = self._captured(size, memory, stream)
        except Exception as error:  # the other shards have to know
            failed = error
        well = self._agreed(made is not None)
        if failed is not None:
            raise failed
        if made is None or not well:
            raise RuntimeError("another shard cannot capture them")
        return made

    def _captured(self, size: int, memory: Any, stream: Any) -> Captured:
        """The graphs of a size."""
        between: list[Between] = []
        rows = self._buffers.rows(slice(0, size))
        current = torch.cuda.current_stream(self._form.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), _Recording(memory) as recording:
                # First without capture, which forbids to compile and load kernels and to allocate workspaces.
                rows.first[:1].zero_()
                self._run(rows, lambda _: None)
                recording.begin()

                def cut(then: Between) -> None:
                    recording.next()
                    between.append(then)

                self._run(rows, cut)
        finally:
            current.wait_stream(stream)  # before the buffers are used again, or given back
        return Captured(recording.graphs, between)

    def _run(self, rows: Buffers, cut: Callable[[Between], None]) -> None:
        """Run the layers over the buffers. cut: called where something would be done between graphs, with that."""

        def summed(x: Tensor) -> Tensor:
            rows.summed.copy_(x)
            cut(self._sum)
            return rows.summed

        with nullcontext() if self._tp is None else self._tp.captured(summed):
            self._layers(rows.hidden, rows.positions, _Seam(self._pool, rows, cut), rows.first[:, None] < 0)

    def _sum(self, _: AttentionPass, rows: Buffers) -> None:
        """Sum over the shards."""
        assert self._tp is not None
        result = self._tp.all_reduce(rows.summed).wait()
        if result is not rows.summed:
            rows.summed.copy_(result)

    def _try(self, size: int, attention: Attention) -> None:
        """Raises RuntimeError unless a pass has the same values with graphs as without."""
        room = min(self._form.positions, self._pool.pages * self._pool.page_size)
        count = min(room, size - (size > 2))  # with padding
        spans = [AttentionSpan(0, count, np.arange(ceil_div(count, self._pool.page_size)))]
        device = self._form.device
        positions = torch.arange(count, device=device)
        hidden = torch.randn(count, self._form.hidden, device=device).to(self._form.dtype)
        plain = hidden.clone()
        self._layers(plain, positions, attention(spans), None)
        if not self.holds(count):
            return  # the positions of all requests are fewer than the size
        gap = (self.run(hidden, positions, attention(spans)).float() - plain.float()).norm() / plain.float().norm()
        value = gap.item()
        if not self._agreed(value <= TOLERANCE):
            raise RuntimeError(f"a pass of {count} tokens differs by {value:.2g} from the same without graphs")


class _Recording:
    """Graphs that are captured one after the other, on the current stream."""

    def __init__(self, memory: Any) -> None:
        """memory: the handle of a memory pool."""
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._memory = memory
        self._open = False

    def __enter__(self) -> "_Recording":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._open:
            return
        if kind is None:
            self.end()
            return
        with suppress(RuntimeError):  # the first error says more
            self.end()

    def begin(self) -> None:
        """Begin a graph. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        self._open = True
        self.graphs.append(graph)

    def end(self) -> None:
        """End it."""
        self._open = False
        self.graphs[-1].capture_end()

    def next(self) -> None:
        """End a graph, and begin the next one."""
        self.end()
        self.begin()


class _Seam(AttentionPass):
    """Stands in for attention while layers are captured."""

    def __init__(self, pool: KVPool, rows: Buffers, cut: Callable[[Between], None]) -> None:
        """rows: of the size that is captured. cut: called where attention would be, with it."""
        self._pool, self._rows, self._cut = pool, rows, cut

    def slots(self, layer: int) -> KvSlots:
        """See AttentionPass."""
        first, write = self._rows.first, partial(write_padded, self._pool, layer, self._rows.first)
        return KvSlots(self._pool.slots_from(layer), first, self._pool.page_size, write)

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass. What it will have given when the next graph is replayed."""
        self._rows.query.copy_(query)
        self._cut(partial(_attend, layer))
        return self._rows.attended


def _attend(layer: int, attention: AttentionPass, rows: Buffers) -> None:
    rows.attended.copy_(attention.attend(layer, rows.query, rows.query[:, :0]))


def capture_graphs(
    layers: Layers,
    form: StageForm,
    pool: KVPool,
    attention: Attention,
    tokens: int,
    step: Callable[[], None],
    tp: GraphedCollectives | None = None,
) -> PassGraphs | None:
    """Graphs of passes of up to so many tokens, see PassGraphs; None where capturing fails, as the log says. Raises
    LinkBroken when another shard is gone."""
    try:
        with torch.inference_mode():
            graphs = PassGraphs(layers, form, pool, graph_sizes(tokens), step, tp)
            graphs.capture(attention)
            return graphs
    except LinkBroken:
        raise
    except Exception as error:  # whatever it is, passes run without them
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("passes run without CUDA graphs: %s", reason)
        return None
