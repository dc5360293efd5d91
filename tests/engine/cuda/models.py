"""ModelRunner on a GPU that is not there, at the widths of large models, and the rows of its passes."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import DEEPSEEK_V3, LLAMA_8B, QWEN3_30B_A3B
from headrace.core.config import AttentionChoice, Compile, CudaGraphs, EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types import packed
from headrace.core.types.requests.request import SamplingParams
from headrace.engine import device, runner
from headrace.engine.attention import triton_work
from headrace.engine.collectives.graphed import GraphedCollectives
from headrace.engine.collectives.operations import ALONE, Collectives, Done
from headrace.engine.layers import graphs, grouped_experts, native_decoder
from headrace.engine.layers.exchange import Exchange, NoExchange, make_exchange
from headrace.engine.layers.grouped_experts import Expert, Stacked
from headrace.engine.load_plan import model_terms
from headrace.engine.model import arithmetic
from headrace.engine.model.arithmetic import (
    HeadRules,
    KvSlots,
    LatentRules,
    Normed,
    Rows,
    Stream,
    TorchArithmetic,
    Weight,
    unnormed,
)
from headrace.engine.model.expert_choice import ExpertChoice
from headrace.engine.model.expert_plan import Way, own_experts
from headrace.engine.model.expert_rows import SortedRows
from headrace.engine.model.float8 import Float8Weight
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.rope import rotate
from headrace.engine.model.sharding import part_of, split_model
from headrace.engine.model.weights import LayerReader
from headrace.engine.runner import ModelRunner
from headrace.engine.triton.products import LEAST_ROWS
from tests.engine.cuda.fake_gpu import Counts, FakeGpu, current

PAGE_SIZE = 16
KV_PAGES = 4096
LONGEST = KV_PAGES * PAGE_SIZE // 2
GREEDY = SamplingParams(temperature=0.0)


class Model(NamedTuple):
    """A published model, of which a few layers are run."""

    config: dict[str, Any]
    first: int = 0
    """The first layer that is run, where those before it are others."""
    shards: int = 1


MODELS = {
    "llama-3.1-8b": Model(LLAMA_8B),
    "llama-3.3-70b-tp4": Model(LLAMA_8B | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    }, shards=4),
    "qwen3-30b-a3b": Model(QWEN3_30B_A3B),
    "deepseek-v3-tp8": Model(DEEPSEEK_V3, first=3, shards=8),
}  # fmt: skip


WIDTHS = [
    pytest.param(name, marks=() if name in ("llama-3.1-8b", "qwen3-30b-a3b") else pytest.mark.full) for name in MODELS
]
"""Parameters: a dense model and one with experts, and all of them in the full run."""


class _Weights:
    """A checkpoint without values."""

    def read(self, _: str, shape: Sequence[int], rows: Any = None, columns: Any = None) -> Tensor:
        height = shape[0] if rows is None else len(rows)
        width = list(shape[1:]) if columns is None else [len(columns)]
        return torch.empty(height, *width, dtype=torch.bfloat16)

    def read_int8(self, *_: object, **__: object) -> None:
        return None

    def read_float8(self, _: str, shape: Sequence[int], rows: Any = None, columns: Any = None) -> Float8Weight | None:
        values, scales = (
            torch.empty(*shape, dtype=torch.float8_e4m3fn),
            torch.empty(-(-shape[0] // 128), shape[1] // 128),
        )
        return Float8Weight(values, scales, 128).part(rows or range(shape[0]), columns or range(shape[1]))


def _read_stacked(
    moe: MoeSpec, hidden: int, own: range, read: LayerReader, shared: Expert | None = None
) -> tuple[Stacked, Stacked]:
    """As grouped_experts.read_stacked(), without reading experts one by one: here they are all alike."""
    first = grouped_experts.read_expert(moe, hidden, own.start, read)
    count = len(own) + (shared is not None)
    return grouped_experts._room(count, first.gate_up), grouped_experts._room(count, first.down)


class _Serial:
    """A ThreadPoolExecutor of this thread: torch's modes belong to one thread."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "_Serial":
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, function: Any, values: Iterable[Any]) -> Iterator[Any]:
        return map(function, values)


class OneShard:
    """Collectives of the first of several shards, without the others: what is sent is counted."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: Counter[str] = Counter()

    def all_reduce(self, x: Tensor) -> Done:
        self.sent["all_reduce"] += x.nbytes
        return Done(x)

    def all_gather(self, x: Tensor) -> Done:
        return self._grown(x, "all_gather")

    def gather(self, x: Tensor, _: int) -> Done:
        return self._grown(x, "gather")

    def reduce_scatter(self, x: Tensor) -> Done:
        self.sent["reduce_scatter"] += x.nbytes
        return Done(x.new_empty(len(x) // self.size, *x.shape[1:]))

    def all_to_all(self, x: Tensor, _: Sequence[int], received: Sequence[int]) -> Done:
        self.sent["all_to_all"] += x.nbytes
        return Done(x.new_empty(sum(received), *x.shape[1:]))

    def broadcast(self, x: Tensor, _: int) -> Done:
        return Done(x)

    def _grown(self, x: Tensor, name: str) -> Done:
        self.sent[name] += x.nbytes
        return Done(x.new_empty(self.size * x.shape[0], *x.shape[1:]))


class _Fused(TorchArithmetic):
    """What TritonArithmetic is: one launch for each operation, and what that reads and writes."""

    compiled = True

    def __init__(self, gpu: FakeGpu, share: float, wanted: Compile) -> None:
        """share: of the experts, that this shard has. wanted: "products" has dense ones of our own, too."""
        self._gpu = gpu
        self._share = share
        self._dense = wanted == "products"

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        with self._gpu.as_one("add_norm", (2 if delta is None else 4) * hidden.nbytes):
            return arithmetic.add_norm(hidden, delta, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        with self._gpu.as_one("rotate", 4 * x.nbytes):  # into a buffer, and back: in place it would read what it wrote
            rotate(x, cos, sin)

    def gate(self, gate_up: Tensor) -> Tensor:
        with self._gpu.as_one("gate", gate_up.nbytes * 3 // 2):
            return arithmetic.gate(gate_up)

    def gated_linear(self, x: Rows, gate_up: Weight) -> Tensor:
        if not self._own(x, gate_up):
            return super().gated_linear(x, gate_up)
        with self._product(x):
            rows = unnormed(x)
            return rows.new_empty(len(rows), gate_up.shape[0] // 2)

    def gated_experts(self, x: Tensor, gate_up: Tensor | Float8Weight, rows: SortedRows, k: int) -> Tensor:
        if not self._own(x, gate_up):
            return super().gated_experts(x, gate_up, rows, k)
        with self._product(x, rows.sources.nbytes):
            return x.new_empty(len(rows.sources), gate_up.shape[1] // 2)

    def linear_to(self, hidden: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor | Stream:
        if not self._own(x, weight):
            return super().linear_to(hidden, x, weight, bias)
        parts = -(-hidden.shape[1] // 128)
        with self._product(x, hidden.nbytes + 4 * len(x) * parts):  # what it is added to, and the power
            hidden.add_(x @ weight.T)
            return Stream(hidden, torch.empty(len(x), parts, device=x.device))

    def head_linear(
        self, x: Rows, weight: Weight, bias: Tensor | None,
        rules: HeadRules, cos: Tensor, sin: Tensor, slots: KvSlots | None,
    ) -> Tensor:  # fmt: skip
        if slots is None or not self._own(x, weight):
            return super().head_linear(x, weight, bias, rules, cos, sin, slots)
        with self._product(x, cos.nbytes + slots.first.nbytes):
            heads = rules.split(unnormed(x) @ weight.T)
            TorchArithmetic().place_heads(heads, rules, cos, sin, slots)
            return heads[:, : rules.query_heads].clone()

    def _own(self, x: Rows, weight: object) -> TypeGuard[Tensor]:
        wanted = isinstance(weight, Tensor) and (self._dense or weight.dim() == 3)
        return wanted and len(unnormed(x)) >= LEAST_ROWS

    @contextmanager
    def _product(self, x: Rows, moved: int = 0) -> Iterator[None]:
        """moved: beside rows, weight and result; weights of norms are left out."""
        power = x.stream.powers.nbytes if isinstance(x, Normed) else 0
        with self._gpu.as_one("product", moved + power):
            yield

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, Float8Weight):
            return super().linear(x, weight, bias)
        return self._in_float8(x, weight, 1.0)

    def grouped_linear(self, x: Tensor, weight: Tensor | Float8Weight, rows: SortedRows) -> Tensor:
        if not isinstance(weight, Float8Weight):
            return super().grouped_linear(x, weight, rows)
        return self._in_float8(x, weight, self._share)

    def _in_float8(self, x: Tensor, weight: Float8Weight, share: float) -> Tensor:
        with self._gpu.as_one("quantize", int(share * x.nbytes * 3 // 2)):
            values = x.to(torch.float8_e4m3fn)
        with self._gpu.as_one("scaled_product", weight.values.nbytes):
            return values.new_empty(len(x), weight.values.shape[-2], dtype=x.dtype)

    def place_heads(self, heads: Tensor, rules: HeadRules, cos: Tensor, sin: Tensor, slots: KvSlots | None) -> None:
        with self._gpu.as_one("place_heads", 2 * heads.nbytes + cos.nbytes):
            TorchArithmetic().place_heads(heads, rules, cos, sin, slots)

    def rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        with self._gpu.as_one("rotate_pairs", 2 * x.nbytes + cos.nbytes):
            TorchArithmetic().rotate_pairs(x, cos, sin)

    def place_latents(
        self, joined: Tensor, rules: LatentRules, cos: Tensor, sin: Tensor, slots: KvSlots | None
    ) -> tuple[Tensor, Tensor]:
        latents = len(joined) * (len(rules.latent_norm) + rules.rope_dim) * joined.element_size()
        with self._gpu.as_one("place_latents", 2 * joined.nbytes + latents + cos.nbytes):
            return TorchArithmetic().place_latents(joined, rules, cos, sin, slots)

    def pack_float32(self, weight: Tensor) -> Tensor:
        return weight

    def linear_float32(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, Tensor)
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    def choose(
        self, logits: Tensor, moe: MoeSpec, bias: Tensor | None = None, shared: slice | None = None
    ) -> ExpertChoice:
        with self._gpu.as_one("choose", logits.nbytes + len(logits) * moe.top_k * 12):
            return super().choose(logits, moe, bias, shared)

    def sort_rows(self, experts: Tensor, own: range, counts: Tensor, shared: int | None = None) -> SortedRows:
        with self._gpu.as_one("place_rows", 2 * experts.nbytes + experts.numel() * 8):
            return super().sort_rows(experts, own, counts, shared)

    def take_rows(self, x: Tensor, rows: SortedRows, k: int) -> Tensor:
        with self._gpu.as_one("take_rows", self._rows(2 * k * x.nbytes)):
            return super().take_rows(x, rows, k)

    def gate_rows(self, gate_up: Tensor, rows: SortedRows) -> Tensor:
        with self._gpu.as_one("gate", self._rows(gate_up.nbytes * 3 // 2)):
            return arithmetic.gate(gate_up)

    def combine_rows(self, results: Tensor, rows: SortedRows, choice: ExpertChoice) -> Tensor:
        with self._gpu.as_one("combine_rows", self._rows(results.nbytes) + results.nbytes // choice.experts.shape[1]):
            return super().combine_rows(results, rows, choice)

    def _rows(self, all_bytes: int) -> int:
        """Of what is moved for all choices, what is moved for those of this shard's experts where choices are even."""
        return int(all_bytes * self._share)


def _attend(
    _: object, __: object, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, tiles: Tensor, begins: Tensor,
    stops: Tensor, sinks: Tensor, out: Tensor, *___: object, **____: object,
) -> None:  # fmt: skip
    """What the launch of our kernel `attend` reads and writes."""
    with current().as_one("attend", query.nbytes + out.nbytes):
        for each in (query, tiles, begins, stops, sinks):
            each.sum()
        for each in (keys, values):
            each.index_select(0, table.flatten())
        out.zero_()


@contextmanager
def fake_runner(
    gpu: FakeGpu,
    folder: Path,
    name: str,
    count: int = 2,
    *,
    whole: bool = False,
    halves: bool = False,
    way: Way | None = None,
    float8: bool = False,
    cuda_graphs: CudaGraphs = "auto",
    attention: AttentionChoice = "auto",
    compiled: Compile = "on",
) -> Iterator[ModelRunner]:
    """A runner of some layers of a model, in bfloat16. folder: for its config.json. count: of layers. whole: of a model
    that has no other layers, with embedding and output head. halves: for passes that are cut. way: of the exchange
    between two replicas that divide the experts. cuda_graphs: whether a start captures them. attention: that is
    wanted. compiled: "products" and "off" as with --compile."""
    model = MODELS[name]
    config = dict(model.config)
    layers = range(model.first, model.first + count)
    if whole:
        config["num_hidden_layers"], layers = layers.stop, range(layers.stop)
    (folder / "config.json").write_text(json.dumps(config))
    group: Collectives = GraphedCollectives(OneShard(model.shards)) if model.shards > 1 else ALONE
    with ExitStack() as stack:
        for patched in (
            patch.object(device, "_gpus", lambda: 8),
            patch.object(native_decoder, "ThreadPoolExecutor", _Serial),
            patch.object(runner, "open_checkpoint", lambda *_: _Weights()),
            patch.object(grouped_experts, "read_stacked", _read_stacked),
            patch.object(runner, "fingerprint", lambda *_: "fake"),
            patch.object(runner, "check_equal_sums", lambda *_: None),
            patch.object(runner, "least", lambda _, value, __: value),
            patch.object(graphs, "least", lambda _, value, __: value),
            patch.object(
                runner,
                "choose_arithmetic",
                lambda *_: _Fused(gpu, 1 / model.shards, compiled) if compiled != "off" else TorchArithmetic(),
            ),
            patch.object(triton_work, "launch", _attend),
            gpu,
        ):
            stack.enter_context(patched)
        terms = model_terms(
            ModelConfig(model=str(folder), dtype="bfloat16", device="cuda:0"),
            EngineConfig(page_size=PAGE_SIZE, kv_pages=KV_PAGES, cuda_graphs=cuda_graphs, attention=attention),
            LONGEST,
        )._replace(float8=float8)
        moe = terms.spec.moe
        experts = len(own_experts(moe.experts, group.size, group.rank)) if moe and group.size > 1 else None
        exchanges: list[Exchange] = [NoExchange(moe.experts if moe else 0) for _ in range(2)] if halves else []
        if way is not None and moe is not None:
            ep = OneShard(2 * group.size)
            exchanges = [make_exchange(way, moe, group, OneShard(2), ep, "cuda:0")]
            experts = len(exchanges[0].own)
        part = part_of(terms.spec, layers, split_model(terms.spec, group.size)[group.rank], experts)
        made = ModelRunner(terms.plan(part, KV_PAGES, 8000 << 30), tp=group, exchanges=exchanges)
        gpu.divide(made.pool.tensor, made.pool.tensor.stride(0) * made.pool.tensor.element_size())
        yield made


class Cost(NamedTuple):
    """What a pass costs."""

    layer_launches: int
    pass_launches: int
    """Beside those of its layers."""
    layer_bytes: int
    """Beside matrix products and attention."""
    counts: Counts
    """Of the pass through one layer, with its lines."""


PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "_varlen_attn", "[attend]", "[paged_attention]")


def pass_cost(
    gpu: FakeGpu,
    folder: Path,
    name: str,
    rows: Sequence[PlanRow],
    attention: AttentionChoice = "auto",
    *,
    compiled: Compile = "on",
) -> Cost:
    """Of a pass over these rows, by the difference between one layer and two. compiled: see fake_runner()."""
    found = []
    for count in (1, 2):
        with fake_runner(gpu, folder, name, count, attention=attention, compiled=compiled) as made:
            hidden = incoming(made, rows)
            with gpu.counted() as counts:
                made.forward(rows, hidden)
            found.append(counts)
    launches, more = (counts.launches.total() for counts in found)
    moved, more_moved = (sum(n for what, n in counts.moved.items() if what not in PRODUCTS) for counts in found)
    layer = more - launches
    return Cost(layer, launches - layer, more_moved - moved, found[0])


def row(request: int, start: int, count: int, *, first_page: int = 0, sample: SamplingParams | None = None) -> PlanRow:
    """A row of a plan whose pages are consecutive from one on."""
    pages = range(first_page, first_page + -(-(start + count) // PAGE_SIZE))
    return PlanRow(request, start, count, packed.pack(pages), packed.pack([1] * count), sample=sample)


def incoming(made: ModelRunner, rows: Sequence[PlanRow]) -> Tensor:
    """Hidden states from the stage before."""
    form = made.hidden_spec
    return torch.empty(sum(each.count for each in rows), form.size, dtype=form.dtype, device=form.device)
