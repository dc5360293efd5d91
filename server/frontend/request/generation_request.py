"""One prompt to continue: the request, what it generates, and how it ends."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from headrace.core.messages.replies import Progress
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.constraint import Constraint
from headrace.core.types.requests.draft import HiddenStates
from headrace.core.types.requests.kv_hints import GivenHint, HintAnswer, KvHintsEnvelope
from headrace.core.types.requests.remote_prefill import PrefillReason
from headrace.core.types.requests.request import (
    FinishReason,
    HandoffStats,
    Promise,
    SamplingParams,
    Timing,
    TokenLogprob,
    Usage,
)
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.frontend.request.images import RequestImage
from headrace.server.frontend.request.request_context import RequestContext
from headrace.server.upstream.discovery_client import Feature
from headrace.server.upstream.handoff_params import KvSource, PrefillAddress, PrefixOffer


class RequestObserver(Protocol):
    """Sees the prompts of one HTTP request begin and end, for the request log."""

    def began(self, rid: str, sampling: SamplingParams) -> None:
        """A prompt was admitted under this request id."""
        ...

    def promised(self, bound_s: float) -> None:
        """A choice is to have its first token within so many seconds."""
        ...

    def first_token(self, seconds: float) -> None:
        """The first token of a choice came so many seconds after its prompt was admitted."""
        ...

    def ended(self, result: "GenerationResult") -> None:
        """A choice ended well."""
        ...

    def failed(self, error: ErrorInfo) -> None:
        """A choice failed."""
        ...

    def refused(self, error: ErrorInfo) -> None:
        """A choice was not admitted."""
        ...


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One validated prompt with its sampling parameters. An HTTP request has one for each prompt and choice."""

    rid: str
    """Request id, unique for the life of the server."""
    prompt: tuple[int, ...]
    """Token ids."""
    sampling: SamplingParams
    """As the client gave it: tokens of stop strings and EOS are not among its stop_token_ids yet."""
    constraint: Constraint | None = None
    """What the text has to match; it was found to compile."""
    shown: frozenset[int] = frozenset()
    """Special tokens that are part of the text; others are left out."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    keep_stop: bool = False
    """The stop string or token that ends the text is part of it."""
    ignore_eos: bool = False
    """Continue after EOS."""
    terms: RequestTerms = RequestTerms()
    model: str = ""
    """As the client names it: the model, or one of its adapters; "" for the model."""
    images: tuple[RequestImage, ...] = ()
    """Of the prompt, with their places; terms.image_digest is their digest."""
    kv_hints: KvHintsEnvelope | None = None
    """As the client gave them, for the prefill server."""
    hints: tuple[GivenHint, ...] = ()
    """As they were understood here; terms.retain, terms.demote and terms.let_go are made of them."""
    adapter: str | None = None
    """On a prefill server: the fingerprint that the decode server has of its adapter; None where it does not say."""
    prompt_only: bool = False
    """The prompt's KV or scores alone are wanted: of what is generated, one token, nothing is returned."""
    progress: bool = False
    """Report how far the prefill is."""
    ticket: str | None = None
    """On a prefill server: name under which a decode peer fetches the KV; None drops the KV."""
    hold: bool = False
    """On a prefill server: answer when the prompt is computed, and hold its KV for the peer under a lease."""
    cached_only: bool = False
    """On a server that KV is fetched from: compute nothing, and hand over what the prefix cache has."""
    kv_held_at: PrefillAddress | None = None
    """On a prefill server: the sibling that holds a prefix of the prompt, if a router says so."""
    resume: PrefixOffer | None = None
    """On a prefill server: what the decode server has of it, since another prefill server has failed it."""
    kv_source: KvSource | None = None
    """On a decode server: where the KV is, if the client or a router has sent the prompt to a prefill server."""
    prefill_at: PrefillAddress | None = None
    """On a decode server: the prefill server that is to compute the prompt, if a router has chosen it."""
    prefer: str = ""
    """On a decode server: URL of the configured prefill server that has computed pieces of it; "" for any."""
    context: RequestContext = RequestContext("")
    """Ids that it has on other servers."""
    observer: RequestObserver | None = None

    @property
    def needs(self) -> tuple[Feature, ...]:
        """What a prefill server has to know to compute it."""
        needs: dict[Feature, bool] = {
            "structured_outputs": self.constraint is not None,
            "penalties": self.sampling.adjusts_logits,
            "hidden_states": self.sampling.hidden_states is not None,
            "images": bool(self.images),
        }
        return tuple(feature for feature, needed in needs.items() if needed)


class GenerationDelta(msgspec.Struct, frozen=True):
    """What was generated since the last delta."""

    text: str
    """May be empty while an incomplete character or a possible stop string is held back."""
    tokens: tuple[int, ...] = ()
    """Token ids, without the one that ends the text unless that is part of it."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token if requested, else empty."""
    end_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the token that ends the text, if requested and there is one."""
    offsets: tuple[int, ...] = ()
    """Of each token: characters of the text before it, those of stop strings that were no part of it in the end
    included."""
    end_offsets: tuple[int, ...] = ()
    """Of the token that ends the text, if there is one that is not among the tokens."""
    end_tokens: tuple[int, ...] = ()
    """That token."""


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended."""

    finish_reason: FinishReason | None
    """None if the KV was sent or is held, and generation continues on the decode peer."""
    usage: Usage
    timing: Timing
    stop_reason: int | str | None = None
    """The client's stop token or stop string that ended the text; None for EOS and other ends."""
    handoff: HandoffStats = HandoffStats()
    """What was transferred."""
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    """One for each prompt token if requested, else empty. The first one is None."""
    hidden: HiddenStates | None = None
    """Of the last prompt token, or of all tokens computed, where requested."""
    peer: str = ""
    """The prefill server that the KV came from, or the decode server that it went to."""
    kv: str = ""
    """What became of the KV of a prompt that does not go on here: handoff, held or discarded."""
    promise: Promise | None = None
    """Of its time to first token; None: nothing was promised."""
    prefill: PrefillReason | None = None
    """Why a decode server has had its prompt computed where it was; None where that was not compared."""
    lease_s: float | None = None
    """Seconds for which the KV is held for the peer, 0 if it is not; None unless the request asked for that."""
    retained: int = 0
    """Tokens whose KV is retained as the terms ask for it."""
    demoted: int = 0
    """Tokens whose KV goes to a tier as the terms ask for it."""
    hints: tuple[HintAnswer, ...] = ()
    """What was granted of the request's KV hints."""


Emit = Callable[[Progress | GenerationDelta], Awaitable[None]]


async def discard_events(_event: Progress | GenerationDelta) -> None:
    """The Emit of a request whose result alone matters."""
