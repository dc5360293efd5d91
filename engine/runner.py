"""Model runner of one stage: rows of a plan in; hidden states, sampled tokens and prompt logprobs out."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.core.runtime.progress import LoadProgress, PassProgress
from headrace.core.types import packed
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.ranks.coordinate import Agreement, halves
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.attention.latent import resolve_form
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.collectives.operations import ALONE, Collectives, check_equal_sums, least
from headrace.engine.decoder import Decoder
from headrace.engine.device import has_bfloat16_vectors, has_int8_vectors, has_wide_vectors
from headrace.engine.device_report import Chosen, log_device
from headrace.engine.dtypes import TORCH_DTYPES, Precision
from headrace.engine.grammar.compiler import GrammarCompiler
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import Allocate, KVPool
from headrace.engine.layers.exchange import Exchange, Replicated
from headrace.engine.layers.moe import ExpertRows
from headrace.engine.layers.native_decoder import NativeDecoder
from headrace.engine.load_plan import LoadPlan
from headrace.engine.model.arithmetic import Arithmetic, TorchArithmetic
from headrace.engine.model.checkpoint import (
    CountedCheckpoint,
    GgufCheckpoint,
    GgufTensors,
    SafetensorsCheckpoint,
    open_checkpoint,
)
from headrace.engine.model.fingerprint import fingerprint
from headrace.engine.model.lora import LoraAdapter, distinct
from headrace.engine.native.kernel_calls import Kernels, load_kernels
from headrace.engine.request_images import RequestImages
from headrace.engine.row_sampler import FedTokens, PlanResult, RowSampler, Sampling
from headrace.engine.triton import choose_arithmetic

log = logging.getLogger(__name__)
WARM_UP_REQUEST = -1  # the scheduler numbers requests from 0
WARM_UP_TOKENS = 32


class HiddenSpec(NamedTuple):
    """Hidden states that pass from stage to stage: [tokens, size] of dtype on device."""

    size: int
    dtype: torch.dtype
    device: torch.device


class Runner(Protocol):
    """Executes plans on one stage: forward() on every stage, then sample() on the last one."""

    @property
    def geometry(self) -> Geometry:
        """Shape of the KV pool."""
        ...

    @property
    def pool(self) -> KVPool:
        """KV of this stage's layers."""
        ...

    @property
    def fingerprint(self) -> str:
        """Names what the model computes (engine/model/fingerprint.py)."""
        ...

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        ...

    @property
    def hidden_spec(self) -> HiddenSpec:
        """Form of the hidden states that forward() takes and returns."""
        ...

    @property
    def expert_rows(self) -> ExpertRows | None:
        """Counters of this rank's experts; None where its layers have none."""
        ...

    @property
    def progress(self) -> PassProgress:
        """Steps of all passes so far."""
        ...

    @property
    def cancels(self) -> bool:
        """A pass ends soon after progress.cancel(), with hidden states and KV of no use."""
        ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Fingerprints of LoRA adapters that rows may go through, by the name of --lora."""
        ...

    @property
    def same_bits(self) -> bool | None:
        """Whether a trial at loading gave the same bits in chunks and beside another request; None: none was made."""
        ...

    @property
    def reproducible(self) -> bool:
        """KV has the same bits however prompts are cut, batched and cached, here and where the same is computed."""
        ...

    def warm_up(self, most: int = WARM_UP_TOKENS) -> None:
        """Run once before the first plan, with so many tokens at most; pages of the pool are overwritten."""
        ...

    def feed(self, fed: FedTokens) -> None:
        """Take tokens sampled elsewhere, on the last stage or its first shard, for rows without tokens."""
        ...

    def join(self, agreement: Agreement) -> None:
        """Take part in a pass of lockstep replicas in which this one has no rows: its experts work for the others."""
        ...

    def forward(
        self, rows: Sequence[PlanRow], hidden: Tensor | None = None, agreement: Agreement | None = None
    ) -> Tensor:
        """Run this stage's layers; afterwards the KV of the rows is in the pool.

        hidden: states [tokens, hidden size] from the previous stage, None on the first; tokens in the order of the
        rows. agreement: of all replicas on this pass; None for a single one, and where all have as many tokens. Returns
        states [tokens, hidden size].
        """
        ...

    def sample(self, rows: Sequence[PlanRow], hidden: Tensor) -> Sampling:
        """Sample tokens and compute prompt logprobs for the rows that ask for them, in row order.

        hidden: states [tokens, hidden size] after the last layer. All shards of the last stage call it; the first one
        samples. On the CPU the result is finished.
        """
        ...

    def release(self, request: int) -> None:
        """Drop what is kept for a request; unknown requests are ignored."""
        ...


class ModelRunner:
    """Runs the layers of one stage, or one shard of them. Used by one thread; other threads may read and write pages of
    the pool.

    All shards of a stage make the same calls in the same order. forward() and sample() raise LinkBroken when another
    shard is gone.
    """

    def __init__(
        self,
        plan: LoadPlan,
        *,
        allocate: Allocate | None = None,
        exchanges: Sequence[Exchange] = (),
        tp: Collectives = ALONE,
        loading: LoadProgress | None = None,
    ) -> None:
        """Load the weights and allocate the pool.

        allocate: see KVPool. exchanges: how the ranks of the stage share experts, one for each half of passes that are
        cut; without any, the shards divide them. tp: the shards of this stage. loading: counts the weights that are
        read. Raises ConfigError for files or a compilation that do not work, LinkBroken when another shard is gone.
        """
        (terms, part, memory), loading = plan, loading or LoadProgress()
        engine, spec, (device, dtype, native) = terms.engine, terms.spec, terms.computation
        if engine.threads:
            torch.set_num_threads(engine.threads)
        if not exchanges and spec.moe is not None and tp.size > 1:
            exchanges = [Replicated(spec.moe.experts, tp)]
        kernels = _kernels(engine.cpuinfo) if device == "cpu" and (dtype != "float16" or not native) else None
        compute = TORCH_DTYPES[terms.computation.compute_dtype]
        check_equal_sums(tp, spec.hidden_size, compute, device)
        kv_pages = least(tp, memory.kv_pages, device)  # the same on all shards, whose heads may differ in number
        checkpoint = open_checkpoint(terms.source, spec)
        loading.begin(plan.weights, memory.weight_bytes)
        self._part, self._max_model_len, self._pass_tokens = part, terms.length, engine.pass_tokens
        held = TORCH_DTYPES[memory.weight_dtype]
        precision = Precision(TORCH_DTYPES[dtype], held, compute, terms.int8, terms.float8)
        self._graphs = engine.cuda_graphs == "auto"
        arithmetic = choose_arithmetic(engine.compile, device, kernels or TorchArithmetic())
        self._decoder = _make_decoder(plan, checkpoint, loading, precision, arithmetic, kernels, exchanges, tp)
        loading.end()
        self.expert_rows = self._decoder.expert_rows
        self.progress, self.cancels = self._decoder.progress, self._decoder.cancels
        self.fingerprint = fingerprint(spec, checkpoint, terms.model.quantize, terms.length)
        self.adapters: Mapping[str, str] = {adapter.name: adapter.fingerprint for adapter in terms.adapters}
        self.vocab_size = spec.vocab_size
        self.hidden_spec = HiddenSpec(spec.hidden_size, compute, torch.device(device))
        self.geometry = plan.geometry
        self.pool = KVPool(self.geometry, kv_pages, device, allocate)
        self._decoder.attach(self.pool)
        layers = "torch's operators" if type(arithmetic) is TorchArithmetic else "Triton's kernels"
        weights = "FP8 where they are published so" if precision.float8 else memory.weight_dtype
        self._computed_by = f"attention by {self._decoder.attention}; layers by {layers}; weights in {weights}"
        self._available_bytes = memory.available_bytes
        self.same_bits: bool | None = None
        if spec.library is not None:
            self._try_library(spec.library.architecture, distinct(terms.adapters))
        plain = kernels is not None and arithmetic is kernels and dtype != "float16"
        self.reproducible = plain and self.same_bits is not False and not self.geometry.state_bytes
        compiler = partial(GrammarCompiler, terms.model.model, engine.cache_dir, spec.vocab_size)
        self._images = RequestImages(self._decoder.encode)
        self._sampler = RowSampler(self._decoder, tp.rank, tp.size, compiler)

    def _try_library(self, architecture: str, adapters: Sequence[LoraAdapter]) -> None:
        """See try_decoder(). Raises ConfigError."""
        from headrace.engine.library.decoder import LibraryDecoder
        from headrace.engine.library.trial import try_decoder

        form = self.hidden_spec

        def incoming(count: int, seed: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            if self._part.first:
                return torch.randint(self.vocab_size, (count,), generator=generator).to(form.device)
            return torch.randn(count, form.size, generator=generator).to(form.device, form.dtype)

        assert isinstance(self._decoder, LibraryDecoder)
        trial = try_decoder(self._decoder, self.pool, self._max_model_len, incoming)
        for adapter in adapters:
            try:
                tried = try_decoder(self._decoder, self.pool, self._max_model_len, incoming, adapter.fingerprint)
            except ValueError as error:
                raise ConfigError(f"--lora {adapter.name}: {error}") from error
            trial = max(trial, tried)
        self.same_bits = trial.same_bits
        what = "the same bits" if trial.same_bits else f"the same up to rounding ({trial.gap:.1g})"
        log.info(
            "%s by transformers' modules: a trial in chunks and beside another request gave %s", architecture, what
        )

    def warm_up(self, most: int = WARM_UP_TOKENS) -> None:
        """See Runner. Runs a chunk and a decoding row, so that kernels and threads exist before the first plan; on a
        GPU captures CUDA graphs and runs the largest pass, too, and what was found and chosen is logged. Raises
        ConfigError when memory is too little for that."""
        count = min(most, WARM_UP_TOKENS, self.pool.pages * self.geometry.page_size, self._max_model_len)
        pages = packed.pack(range(self.geometry.pages_for(count)))
        greedy = SamplingParams(temperature=0.0)
        on_gpu = self.hidden_spec.device.type == "cuda"
        beside = _beside_torch(self.hidden_spec.device) if on_gpu else 0
        for row in (
            PlanRow(WARM_UP_REQUEST, 0, count, pages, packed.pack([0] * count), sample=greedy, slot=0),
            PlanRow(WARM_UP_REQUEST, count - 1, 1, pages, packed.pack([0]), sample=greedy, slot=0),
        ):
            hidden = self.forward([row], self._zeros(row.count))
            if self._part.last:
                self.sample([row], hidden).result()
        if on_gpu:
            if self._graphs:
                self._decoder.capture(self._pass_tokens)
            positions = self.pool.pages * self.geometry.page_size
            self._try_largest_pass(min(most, self._pass_tokens, positions))
            beside = _beside_torch(self.hidden_spec.device) - beside
            log.info("libraries and links took %d MiB of %s since the weights", beside >> 20, self.hidden_spec.device)
            chosen = Chosen(self._computed_by, self._pass_tokens, positions, self.pool.memory.nbytes)
            log_device(self.hidden_spec.device, self.hidden_spec.dtype, self._available_bytes, chosen)
        self.release(WARM_UP_REQUEST)

    def _try_largest_pass(self, tokens: int) -> None:
        """Raises ConfigError when a pass of so many tokens does not fit beside weights and KV. tokens: 0 where none is
        the largest."""
        if not tokens:
            return
        device = self.hidden_spec.device
        length = min(tokens, self._max_model_len)
        pages = packed.pack(range(self.geometry.pages_for(length)))
        counts = [length] * (tokens // length) + ([tokens % length] if tokens % length else [])
        rows = [PlanRow(WARM_UP_REQUEST, 0, count, pages, packed.pack([0] * count), slot=0) for count in counts]
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            self.forward(rows, self._zeros(tokens))
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError as error:
            text = f"a pass of {tokens} tokens does not fit on {device} beside weights and KV"
            raise ConfigError(f"{text}: write a smaller --chunk-tokens or --kv-memory, or fewer --kv-pages") from error
        taken, free = torch.cuda.max_memory_allocated(device) - before, torch.cuda.mem_get_info(device)[0]
        log.info(
            "a pass of %d tokens takes %d MiB beside weights and KV; %d MiB of %s are free",
            tokens, taken >> 20, free >> 20, device,
        )  # fmt: skip

    def _zeros(self, tokens: int) -> Tensor | None:
        """What a stage before this one could have sent; None on the first."""
        form = self.hidden_spec
        return None if self._part.first else torch.zeros(tokens, form.size, dtype=form.dtype, device=form.device)

    def execute(self, rows: Sequence[PlanRow]) -> PlanResult:
        """Forward pass and sampling, where this stage is the only one. Raises what forward() raises."""
        return self.sample(rows, self.forward(rows)).result()

    def feed(self, fed: FedTokens) -> None:
        """See Runner."""
        self._sampler.feed(fed)

    def forward(
        self, rows: Sequence[PlanRow], hidden: Tensor | None = None, agreement: Agreement | None = None
    ) -> Tensor:
        """See Runner. Without rows only the exchanges of a pass are entered, for other replicas' tokens.

        Raises ValueError for a row whose tokens or pages do not cover its positions, or whose adapter is not here,
        IndexError for a page outside the pool."""
        with torch.inference_mode():
            count = sum(row.count for row in rows)
            agreed = Agreement((count,)) if agreement is None else agreement
            self._decoder.begin(agreed.tokens, agreed.padded or count, agreed.cut)
            if not rows:
                return self._decoder.take_part()
            if self._part.last:
                self._sampler.begin(rows)
            spans = [
                AttentionSpan(
                    row.start,
                    row.count,
                    row_pages(row, self.pool),
                    slot=row.slot,
                    resume=row.resume,
                    checkpoint=row.checkpoint,
                    adapter=self._adapter(row),
                    rotary=_rotary(row),
                    image=self._images.rows(row) if self._part.first else None,
                )
                for row in rows
            ]
            ranges = [np.arange(row.start, row.start + row.count) for row in rows]
            positions = place(np.concatenate(ranges), self.hidden_spec.device)
            if hidden is None:
                hidden = self._decoder.embed(self._sampler.token_ids(rows, self.hidden_spec.device))
            if agreed.cut:
                halved = _cut_spans(spans, agreed.cut)
                return self._decoder.forward_halves(hidden, positions, halved, agreed.cut)
            return self._decoder.forward(hidden, positions, spans)

    def _adapter(self, row: PlanRow) -> str:
        if row.adapter and row.adapter not in self.adapters.values():
            raise ValueError(f"request {row.request} goes through adapter {row.adapter}, which is not here")
        return row.adapter

    def sample(self, rows: Sequence[PlanRow], hidden: Tensor) -> Sampling:
        """See Runner and RowSampler."""
        return self._sampler.sample(rows, hidden)

    def join(self, agreement: Agreement) -> None:
        """See Runner."""
        self.forward((), None, agreement)

    def release(self, request: int) -> None:
        """See Runner."""
        self._sampler.release(request)
        self._images.release(request)


def _beside_torch(device: torch.device) -> int:
    """Bytes of a GPU that others than torch's allocator have: libraries such as NCCL, and other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _rotary(row: PlanRow) -> NDArray[np.int64] | None:
    """Rotary positions of a row: int64 [axes, count]; None where they are its positions."""
    return np.frombuffer(row.rotary, "<i4").astype(np.int64).reshape(-1, row.count) if row.rotary else None


def row_pages(row: PlanRow, pool: KVPool) -> NDArray[np.int64]:
    """Page ids of a row: int64 [pages]. Raises ValueError if they do not cover its positions, IndexError for one
    outside the pool."""
    pages = np.frombuffer(row.pages, dtype="<i4").astype(np.int64)
    if len(pages) < pool.geometry.pages_for(row.start + row.count):
        raise ValueError(f"request {row.request} has {len(pages)} pages for {row.start + row.count} positions")
    if pages.min() < 0 or pages.max() >= pool.pages:
        raise IndexError(f"request {row.request} names a page outside the pool of {pool.pages}")
    return pages


def _cut_spans(spans: Sequence[AttentionSpan], cut: int) -> list[list[AttentionSpan]]:
    """The spans of the first cut tokens, and those of the rest. The second part of a span that is in both attends to
    the first through the pool."""
    parts = halves([span.count for span in spans], cut)
    return [
        [replace(spans[part.row], start=spans[part.row].start + part.first, count=part.count) for part in half]
        for half in parts
    ]


def _kernels(cpuinfo: str) -> Kernels | None:
    """The native kernels for what the CPU has. cpuinfo: as in EngineConfig."""
    return load_kernels(
        wide=has_wide_vectors(cpuinfo), bfloat16=has_bfloat16_vectors(cpuinfo), vnni=has_int8_vectors(cpuinfo)
    )


def _make_decoder(
    plan: LoadPlan,
    checkpoint: SafetensorsCheckpoint | GgufCheckpoint | GgufTensors,
    loading: LoadProgress,
    precision: Precision,
    arithmetic: Arithmetic,
    kernels: Kernels | None,
    exchanges: Sequence[Exchange],
    tp: Collectives,
) -> Decoder:
    """The decoder of a plan, with its weights. Arguments and errors as of ModelRunner."""
    terms, part, _ = plan
    spec, (device, _, native) = terms.spec, terms.computation
    adapters = distinct(terms.adapters)
    if spec.library is None:
        assert not isinstance(checkpoint, GgufTensors)
        return NativeDecoder(
            spec,
            CountedCheckpoint(checkpoint, loading),
            part.layers,
            positions=terms.length,
            precision=precision,
            arithmetic=arithmetic,
            device=device,
            shard=part.shard,
            tp=tp,
            exchanges=exchanges,
            mla_form=resolve_form(terms.engine.mla, device),
            kernels=kernels,
            native_units=native,
            attention=terms.engine.attention,
            adapters=adapters,
        )
    from headrace.engine.library.decoder import LibraryDecoder  # imports transformers

    assert isinstance(checkpoint, SafetensorsCheckpoint | GgufTensors)
    return LibraryDecoder(
        spec,
        terms.source,
        checkpoint,
        part.layers,
        positions=terms.length,
        precision=precision,
        arithmetic=arithmetic,
        kernels=kernels,
        device=device,
        loading=loading,
        adapters=adapters,
        shard=part.shard,
        tp=tp,
    )
