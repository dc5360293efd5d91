"""Decoder of one stage by transformers' own modules, over the paged pool."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from headrace.core.runtime.progress import LoadProgress, PassProgress
from headrace.core.types.requests.images import ImageInput
from headrace.engine.attention import choose_work
from headrace.engine.attention.paged import AttentionSpan, ImageRows
from headrace.engine.attention.rings import RingPass
from headrace.engine.attention.slots import LayerSlot, SlotPass
from headrace.engine.collectives.operations import ALONE, Collectives
from headrace.engine.dtypes import Precision
from headrace.engine.kv.pool import KVPool
from headrace.engine.layers.lora import row_groups
from headrace.engine.layers.vocabulary import Best, best_of
from headrace.engine.library.adapters import adapt
from headrace.engine.library.batch import Batch, CachedSlot
from headrace.engine.library.cache import RowsCache
from headrace.engine.library.hooks import running
from headrace.engine.library.images import ImageEncoder
from headrace.engine.library.model import LayersDone, OtherLayer, body_of, call, layer_list, length_ropes, load_model
from headrace.engine.library.modules import OutputHead, Products, fuse_norms, replace_products, widen
from headrace.engine.library.states import StateStore, run_by_request
from headrace.engine.model.arithmetic import Arithmetic, TorchArithmetic, Weight
from headrace.engine.model.checkpoint import GgufTensors, SafetensorsCheckpoint
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.int8 import quantize
from headrace.engine.model.lora import LoraAdapter
from headrace.engine.model.sharding import Shard
from headrace.engine.model.source import ModelSource
from headrace.engine.native.kernel_calls import Kernels

NOTHING: Mapping[str, Any] = MappingProxyType({})


class LibraryDecoder:
    """A stage's layers as transformers has them. See Decoder for what is called, from one thread.

    The states that the last stage gives are behind the model's own final norm.
    """

    expert_rows = None

    def __init__(
        self,
        spec: ModelSpec,
        source: ModelSource,
        checkpoint: SafetensorsCheckpoint | GgufTensors,
        layers: range,
        *,
        positions: int,
        precision: Precision,
        arithmetic: Arithmetic,
        kernels: Kernels | None,
        device: str,
        loading: LoadProgress,
        adapters: Sequence[LoraAdapter] = (),
        shard: Shard,
        tp: Collectives = ALONE,
    ) -> None:
        """Read the weights of these layers, and of nothing else. positions: the longest sequence. adapters: of which
        rows of a pass may go through one each. shard: whose part of the weights. tp: the shards of the stage. Raises
        ConfigError for weights that do not fit the model, LinkBroken when another shard is gone."""
        assert spec.library is not None
        self.progress = PassProgress()
        self.cancels = False
        """See Decoder."""
        library = spec.library
        self._spec, self._arithmetic = spec, arithmetic
        self._make_work = choose_work(kernels, arithmetic)
        self._shard, self._tp = shard, tp
        self._pool: KVPool | None = None
        self._model = load_model(source, checkpoint, layers, precision.model, loading, shard).to(device)
        blocks = layer_list(self._model)
        self._others = {each.place: each for each in blocks if isinstance(each, OtherLayer)}
        for each in blocks:
            if not isinstance(each, OtherLayer):
                each.register_forward_pre_hook(lambda *_: self.progress.step())
        self._compute_ourselves(blocks, precision, library.uncalled)
        self._adapted = adapt(self._model, adapters, layers, arithmetic.pack, precision, device)
        _fix_rotary(self._model, positions)
        name, self._body = body_of(self._model)
        if layers.stop == spec.layers:
            self._given = GivenBody(self._body)
            setattr(self._model, name, self._given)
        self._encoder = (
            ImageEncoder(self._body, library.images, device) if library.images and not layers.start else None
        )
        self._products = Products(arithmetic)
        self._states = StateStore(library, layers)
        self.has_states, self.compute = library.stateful, precision.compute
        self.one_by_one = False
        """Modules with states get the tokens behind a request's first chunk singly: they cannot begin with a state."""
        run_by_request(self._body, library.mixers)
        self._slots = {
            layer: CachedSlot(LayerSlot(*library.place(layer, layers.start)), cached.expanded, cached.window)
            for layer in layers
            if (cached := library.cached[layer]) is not None
        }
        self._rings = {name for each in self._slots.values() if each.window for name in each.slot[:2]}

    @property
    def attention(self) -> str:
        """See Decoder."""
        return "transformers' modules"

    def attach(self, pool: KVPool) -> None:
        """See Decoder."""
        self._pool = pool
        self._states.attach(pool)

    def capture(self, tokens: int) -> None:
        """See Decoder. transformers' modules are not captured."""

    def begin(self, tokens: Sequence[int], padded: int, cut: int = 0) -> None:
        """See Decoder. Nothing is exchanged."""

    def take_part(self) -> Tensor:
        """See Decoder. Raises RuntimeError: such models are in no lockstep."""
        raise RuntimeError("a model of transformers' modules takes part in no other's pass")

    def embed(self, ids: Tensor) -> Tensor:
        """See Decoder. The model embeds them itself: forward() of the first stage takes ids."""
        return ids

    def forward(self, hidden: Tensor, positions: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
        """See Decoder. Of the last stage the states are behind the model's final norm."""
        assert self._pool is not None, "attach() comes first"
        attention = SlotPass(self._pool, self._make_work, spans)
        rings = RingPass(self._pool, self._make_work, spans)
        rings.resume(self._rings)
        batch = Batch(
            attention, rings, self._slots, self._states, positions, self._spec.layers, one_by_one=self.one_by_one
        )
        ids, beside = hidden, NOTHING
        if self._encoder is not None and any(span.image is not None for span in spans):
            beside = self._encoder.inputs(ids, spans)
        if "before" in self._others:
            self._others["before"].given = hidden[None]
            ids = torch.zeros_like(positions)
        cache = RowsCache(batch, self._spec.layers)
        try:
            with (
                running(batch),
                self._products,
                self._adapted.during(row_groups(spans, positions.device), len(positions)),
            ):
                rotary = _rotary(positions, spans)
                found = call(self._body, cache, input_ids=ids[None], position_ids=rotary, **beside)
            states: Tensor = found[0]
        except LayersDone:
            taken = self._others["behind"].taken
            assert taken is not None
            states = taken
        rings.keep_checkpoints(self._rings)
        return states[0]

    def encode(self, image: ImageInput) -> ImageRows:
        """See Decoder."""
        if self._encoder is None:
            raise ValueError("this stage has no encoder of images")
        with self._products:
            return self._encoder.encode(image)

    def forward_halves(
        self, hidden: Tensor, positions: Tensor, spans: Sequence[Sequence[AttentionSpan]], cut: int
    ) -> Tensor:
        """See take_part()."""
        return self.take_part()

    def logits(self, hidden: Tensor) -> Tensor:
        """See Decoder. The model's own head, with all that it does to logits. All of it is on every shard, and the
        first one computes it: no rows on the others."""
        if not self._shard.first:
            return hidden.new_zeros(0, self._spec.vocab_size, dtype=torch.float32)
        self._given.states = hidden[None]
        with self._products:
            logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def best(self, hidden: Tensor) -> Best:
        """See Decoder."""
        return best_of(self.logits(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """See Decoder: they are."""
        return hidden

    def _compute_ourselves(self, blocks: nn.ModuleList, precision: Precision, leave: Collection[str]) -> None:
        """Have our arithmetic compute products and norms, in the precision of the stage. leave: see
        replace_products()."""
        held, compute, int8 = precision.held, precision.compute, precision.int8
        packs = int8 or held == compute
        pack_held = self._arithmetic.pack if packs else TorchArithmetic().pack

        def pack(weight: Tensor) -> Weight:
            return pack_held(weight.to(held).contiguous())

        def pack_int8(weight: Tensor) -> Weight:
            return self._arithmetic.pack(quantize(weight))

        head = self._model.get_output_embeddings()
        if type(head) is nn.Linear:
            self._model.set_output_embeddings(OutputHead(head, self._arithmetic))
        replace = partial(
            replace_products, arithmetic=self._arithmetic, compute=compute, unpacked=pack, leave=leave, tp=self._tp,
        )  # fmt: skip
        replace(blocks, pack=pack_int8 if int8 else pack)
        replace(self._model, pack=pack)
        widen(self._model, held, compute)
        fuse_norms(self._model, self._arithmetic)


class GivenBody(nn.Module):
    """In place of a model's body, where its head is to be computed alone."""

    def __init__(self, body: nn.Module) -> None:
        """body: whose numbers the head may ask for."""
        super().__init__()
        for name, value in vars(body).items():
            if isinstance(value, int | float):
                setattr(self, name, value)
        self.states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> "GivenOutput":
        """The states that were given."""
        assert self.states is not None
        return GivenOutput(self.states)


class GivenOutput:
    """Output of a body: of its fields only the last hidden states are there, the others are None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _rotary(positions: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
    """Rotary positions of a pass: int64 [1, tokens], or [axes, 1, tokens] where a row has some of its own."""
    axes = next((len(span.rotary) for span in spans if span.rotary is not None), 0)
    if not axes:
        return positions[None]
    found = positions.expand(axes, -1).clone()
    first = 0
    for span in spans:
        if span.rotary is not None:
            found[:, first : first + span.count] = torch.from_numpy(span.rotary)
        first += span.count
    return found[:, None]


def _fix_rotary(model: nn.Module, length: int) -> None:
    """Rotations that depend on the longest position of a batch: always those of the longest sequence, so that neither
    chunks nor neighbours change them."""
    for module in length_ropes(model):
        module.forward = partial(_as_longest, module.forward, length)


def _as_longest(forward: Any, length: int, x: Tensor, position_ids: Tensor, *args: Any, **named: Any) -> Any:
    """Rotations of positions beside the last one of the longest sequence."""
    longest = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
    found = forward(x, torch.cat((position_ids, longest), -1), *args, **named)
    return tuple(each[..., :-1, :] for each in found)
