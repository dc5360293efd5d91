"""What a stage computes with: the decoder of its layers, of which there are two.

    NativeDecoder    engine/layers    our own layers, for the families of engine/model/families.py
    LibraryDecoder   engine/library   transformers' own modules over the same pool, for all that it knows

Whatever calls a decoder does not know which one it is.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headrace.core.runtime.progress import PassProgress
from headrace.core.types.requests.images import ImageInput
from headrace.engine.attention.paged import AttentionSpan, ImageRows
from headrace.engine.kv.pool import KVPool
from headrace.engine.layers.moe import ExpertRows
from headrace.engine.layers.vocabulary import Best


class Decoder(Protocol):
    """Weights of a stage's layers and their forward pass; keys and values live in a pool. Used by one thread."""

    @property
    def progress(self) -> PassProgress:
        """Layers that were begun, in all passes."""
        ...

    @property
    def cancels(self) -> bool:
        """A pass ends soon after progress.cancel(), with hidden states and KV of no use."""
        ...

    @property
    def expert_rows(self) -> ExpertRows | None:
        """Counters of the experts of this stage's layers; None where they have none."""
        ...

    @property
    def attention(self) -> str:
        """What computes attention, in words, once a pool is attached."""
        ...

    def attach(self, pool: KVPool) -> None:
        """Where keys and values are; called once, before the first pass."""
        ...

    def capture(self, tokens: int) -> None:
        """Capture CUDA graphs of passes of up to so many tokens, where the layers allow it and it works; 0: of all that
        are worth it. After attach(), on a GPU. Pages of the pool are overwritten."""
        ...

    def begin(self, tokens: Sequence[int], padded: int, cut: int = 0) -> None:
        """Begin a pass. tokens: of every replica, see Exchange.begin(); cut: tokens of its first half."""
        ...

    def take_part(self) -> Tensor:
        """Enter the exchanges of a pass in which this replica has no tokens: its experts work for the others. Returns
        hidden states of no tokens."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids int64 [tokens] → what forward() of the first stage takes."""
        ...

    def encode(self, image: ImageInput) -> ImageRows:
        """The embeddings of an image, with places counted from its first token. First stage only. Raises ValueError
        where the model takes no images, and for pixels that are not what it takes."""
        ...

    def forward(self, hidden: Tensor, positions: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
        """Run this stage's layers over hidden states [tokens, hidden size] at positions int64 [tokens].

        spans: the rows, in order. Returns hidden states [tokens, hidden size]. Raises LinkBroken when another rank is
        gone.
        """
        ...

    def forward_halves(
        self, hidden: Tensor, positions: Tensor, spans: Sequence[Sequence[AttentionSpan]], cut: int
    ) -> Tensor:
        """The same in two halves that take turns, tokens [0, cut) and the rest. spans: of each half."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states [rows, hidden size] → float32 logits [rows, vocabulary]; no rows on shards other than the
        first. Last stage only."""
        ...

    def best(self, hidden: Tensor) -> Best:
        """The largest logits of final hidden states [rows, hidden size], with less exchange among shards. Last stage
        only."""
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last layer [rows, hidden size] → after the final norm: what the output head
        multiplies. Last stage only."""
        ...
