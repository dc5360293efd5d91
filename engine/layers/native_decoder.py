"""Decoder of one stage by our own layers: the embedding on the first stage, the output head on the last."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from headrace.core.config import AttentionChoice, MlaForm
from headrace.core.runtime.progress import PassProgress
from headrace.core.types.requests.images import ImageInput
from headrace.engine.attention import choose_attention, choose_latent_attention
from headrace.engine.attention.native import NativePass
from headrace.engine.attention.paged import Attention, AttentionPass, AttentionSpan, ImageRows
from headrace.engine.collectives.graphed import GraphedCollectives
from headrace.engine.collectives.operations import ALONE, Collectives
from headrace.engine.collectives.steps import Steps, finish, take_turns
from headrace.engine.dtypes import Precision
from headrace.engine.kv.pool import KVPool
from headrace.engine.layers.base import Rotary
from headrace.engine.layers.exchange import Exchange, NoExchange, begin_pass
from headrace.engine.layers.graphs import PassGraphs, StageForm, capture_graphs
from headrace.engine.layers.latent_attention import LatentAttentionBlock
from headrace.engine.layers.layer import Layer, load_layer
from headrace.engine.layers.lora import Groups, row_groups
from headrace.engine.layers.moe import ExpertRows, MoeMlp
from headrace.engine.layers.task_graph import TaskGraph
from headrace.engine.layers.vocabulary import Best, Vocabulary
from headrace.engine.model.arithmetic import Arithmetic, Stream, TorchArithmetic
from headrace.engine.model.checkpoint import Checkpoint
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.lora import LoraAdapter
from headrace.engine.model.rope import rotary_tables
from headrace.engine.model.sharding import Shard, whole_model
from headrace.engine.model.weights import LayerReader, load_head
from headrace.engine.native.kernel_calls import Kernels

LOADERS = 4  # threads that read layers; each holds a temporary copy of a tensor while converting it


class NativeDecoder:
    """Weights of a stage's layers and their forward pass; see Decoder for what is called.

    Hidden states are in precision.compute, between stages too, so that the number of stages changes no bit. RMSNorm
    (arXiv 1910.07467) and the rotary embedding are computed in float32. A shard has its part of every layer; hidden
    states are whole on all shards, with equal bits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        layers: range,
        *,
        positions: int,
        precision: Precision,
        arithmetic: Arithmetic,
        device: str,
        shard: Shard | None = None,
        tp: Collectives = ALONE,
        exchanges: Sequence[Exchange] = (),
        mla_form: MlaForm = "absorbed",
        kernels: Kernels | None = None,
        native_units: bool = True,
        attention: AttentionChoice = "auto",
        adapters: Sequence[LoraAdapter] = (),
    ) -> None:
        """Read the weights of these layers, and of nothing else.

        positions: length of the rotary tables, the longest sequence. shard: the part of them to read, None for all. tp:
        the shards of this stage. exchanges: how the ranks of the stage share experts, one for each half of passes that
        are cut; none for a rank that holds all. mla_form: see load_layer. kernels, native_units, attention: see
        choose_attention(). adapters: of which rows of a pass may go through one each. Raises ConfigError for a missing
        or misshapen tensor.
        """
        shard = shard or whole_model(spec)
        self.progress = PassProgress()
        """Layers that were begun, in all passes."""
        # Other ranks would wait for one that is through with a pass, and a GPU has queued its layers.
        self.cancels = device == "cpu" and tp.size == 1 and not exchanges
        """See Decoder."""
        self._spec = spec
        self._precision = precision
        self._arithmetic = arithmetic
        self._mla_form, self._kernels, self._native_units = mla_form, kernels, native_units
        self._wanted_attention: AttentionChoice = attention
        self._heads = len(shard.heads)
        self._tp = tp
        self._attention: Attention | None = None
        self.attention = ""
        """See Decoder."""
        self._pool: KVPool | None = None
        self._graphs: PassGraphs | None = None
        self._tasks: TaskGraph | None = None
        # Packing is for weights in 8 bits or held in the compute dtype; others are converted for every product.
        packs = precision.int8 or precision.held == precision.compute
        pack = arithmetic.pack if packs else TorchArithmetic().pack

        self._exchanges = exchanges or (NoExchange(spec.moe.experts if spec.moe else 0),)

        def load(layer: int) -> Layer:
            reader = LayerReader(checkpoint, layer, precision, device, pack, adapters, arithmetic.pack)
            return load_layer(spec, reader, arithmetic, shard, tp, self._exchanges, mla_form)

        with ThreadPoolExecutor(min(LOADERS, torch.get_num_threads())) as loaders:
            self._layers: list[Layer] = list(loaders.map(load, layers))
        self._device = device
        mixtures = [(number, layer.mlp) for number, layer in zip(layers, self._layers, strict=True)]
        self._mixtures = {number: mlp for number, mlp in mixtures if isinstance(mlp, MoeMlp)}
        own = self._exchanges[0].own
        self.expert_rows = ExpertRows(own.start, self._mixtures) if self._mixtures else None
        """See Decoder."""
        first, last = layers.start == 0, layers.stop == spec.layers
        weights = load_head(spec, checkpoint, shard, first=first, last=last, precision=precision, device=device)
        self._norm = weights.norm
        self._vocabulary = Vocabulary(spec.vocab_size, weights.embedding, weights.head, arithmetic, shard, tp)
        cos, sin = rotary_tables(spec.rope, spec.rotary_dim, positions)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def attach(self, pool: KVPool) -> None:
        """See Decoder. Raises ConfigError when an attention is wanted that does not work here."""
        self._pool = pool
        if self._spec.mla is not None:
            blocks = [layer.attention for layer in self._layers]
            self._attention, self.attention = choose_latent_attention(
                self._spec.mla,
                pool,
                self._mla_form,
                [block.projections for block in blocks if isinstance(block, LatentAttentionBlock)],
                kernels=self._kernels,
                wanted=self._wanted_attention,
                heads=self._heads,
            )
        else:
            self._attention, self.attention = choose_attention(
                pool,
                native_units=self._native_units,
                kernels=self._kernels,
                wanted=self._wanted_attention,
                heads=self._heads,
                compiled=self._arithmetic.compiled,
            )
        kernels, dtype = self._kernels, self._precision.compute
        if kernels is not None and TaskGraph.takes(kernels, self._layers, pool, dtype):
            self._tasks = TaskGraph(kernels, self._layers, self._spec, dtype)

    def capture(self, tokens: int) -> None:
        """See Decoder: of layers that queue the same for any pass of as many tokens. Raises LinkBroken when another
        shard is gone."""
        attention, pool = self._attention, self._pool
        assert attention is not None, "attach() comes first"
        assert pool is not None, "attach() comes first"
        tp = self._tp if isinstance(self._tp, GraphedCollectives) else None
        if (tp is None and self._tp.size > 1) or not all(layer.mlp.fixed for layer in self._layers):
            return
        spec = self._spec
        device, dtype = torch.device(self._device), self._precision.compute
        values = spec.mla.value_dim if spec.mla else spec.head_dim
        form = StageForm(spec.hidden_size, self._heads, spec.head_dim, values, dtype, device, len(self._cos))
        self._graphs = capture_graphs(self._whole, form, pool, attention, tokens, self.progress.step, tp)

    def begin(self, tokens: Sequence[int], padded: int, cut: int = 0) -> None:
        """See Decoder and begin_pass()."""
        begin_pass(self._exchanges, tokens, padded, cut)

    def take_part(self) -> Tensor:
        """See Decoder."""
        nothing = torch.empty(0, self._spec.hidden_size, dtype=self._precision.compute, device=self._device)
        for mixture in self._mixtures.values():
            self.progress.step()
            mixture.forward(nothing)
        self._publish()
        return nothing

    def embed(self, ids: Tensor) -> Tensor:
        """See Decoder: hidden states [tokens, hidden size]."""
        return self._vocabulary.embed(ids, self._precision.compute)

    def encode(self, image: ImageInput) -> ImageRows:
        """See Decoder. Raises ValueError: these models have no encoder."""
        raise ValueError("our own layers take no images")

    def forward(self, hidden: Tensor, positions: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
        """See Decoder."""
        attention, groups = self._begun(spans), self._groups(spans)
        if self._graphs is not None and not groups and self._graphs.holds(len(hidden)):
            hidden = self._graphs.run(hidden, positions, attention)
            self._publish()
            return hidden
        hidden = hidden.clone()  # the residual stream, added to in place
        tasks = None if groups else self._tasks
        if tasks is not None and isinstance(attention, NativePass):
            tasks.run(hidden, self._rotary(positions), attention, tasks.tile_rows(spans), self.progress)
        else:
            finish(self._steps(hidden, positions, attention, 0, groups))
        self._publish()
        return hidden

    def _whole(self, hidden: Tensor, positions: Tensor, attention: AttentionPass, padding: Tensor | None) -> None:
        """See graphs.Layers."""
        finish(self._steps(hidden, positions, attention, 0, (), padding))

    def forward_halves(
        self, hidden: Tensor, positions: Tensor, spans: Sequence[Sequence[AttentionSpan]], cut: int
    ) -> Tensor:
        """See Decoder. A half attends to positions of the same pass that the one before it has written for that layer:
        its turn comes later."""
        hidden = hidden.clone()
        rows = (slice(0, cut), slice(cut, len(hidden)))
        take_turns(
            self._steps(hidden[of], positions[of], self._begun(each), half, self._groups(each))
            for half, (of, each) in enumerate(zip(rows, spans, strict=True))
        )
        self._publish()
        return hidden

    def _publish(self) -> None:
        if self.expert_rows is not None:
            self.expert_rows.publish()

    def _begun(self, spans: Sequence[AttentionSpan]) -> AttentionPass:
        assert self._attention is not None, "attach() comes first"
        return self._attention(spans)

    def _groups(self, spans: Sequence[AttentionSpan]) -> Groups:
        return row_groups(spans, torch.device(self._device))

    def _rotary(self, positions: Tensor) -> Rotary:
        return Rotary(self._cos[positions], self._sin[positions])

    def _steps(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: AttentionPass,
        half: int,
        groups: Groups,
        padding: Tensor | None = None,
    ) -> Steps[None]:
        """Run the layers over hidden states [tokens, hidden size], in place."""
        rotary = self._rotary(positions)
        norm, eps = self._arithmetic.norm, self._spec.norm_eps
        delta: Tensor | Stream | None = None
        for index, layer in enumerate(self._layers):
            if self.cancels and self.progress.cancelled:
                return
            self.progress.step()
            normed = norm(hidden, delta, layer.input_norm, eps)
            attended = layer.attention.post(index, normed, rotary, attention, groups, hidden)
            if layer.pauses:
                yield
            summed = attended if isinstance(attended, Stream) else attended.wait()
            before_mlp = norm(hidden, summed, layer.post_norm, eps)
            delta = yield from layer.mlp.steps(before_mlp, half, groups, padding, hidden)
        if isinstance(delta, Tensor):
            hidden.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Decoder."""
        return self._vocabulary.logits(self.normed(hidden))

    def best(self, hidden: Tensor) -> Best:
        """See Decoder."""
        return self._vocabulary.best(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """See Decoder."""
        return self._arithmetic.add_norm(hidden, None, self._norm, self._spec.norm_eps)
