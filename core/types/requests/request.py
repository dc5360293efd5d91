"""Request types: sampling parameters, the route of the KV cache, results and timing."""

from typing import Literal

import msgspec

from headrace.core.types.kv.kv_tiers import NONE_LOADED, TierTokens
from headrace.core.types.requests.draft import Draft
from headrace.core.types.requests.remote_prefill import RemoteForecast

FinishReason = Literal["stop", "length"]
HiddenWanted = Literal["last", "all"]
"""Hidden states that a client asks for: of the last prompt token, or of every token that is computed."""

PromptPosting = Literal["local", "external", "done"]
"""Who posts the prompt of a fetched request to the prefill server.

"local": this server, once its pages are reserved there. "external": a router, before or after the reservation arrives.
"done": a router has posted it, so a prefill server that does not know the ticket fails the reservation at once.
"""


class Route(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Base of the routes: the source of a request's KV cache and its sink.

    route        KV source                  KV sink
    DecodeHere   computed here              decoded here
    SendTo       computed here, or cached   remote: a peer
    FetchFrom    remote: another server     decoded here, or the prefix cache
    Discard      computed here              none
    """

    @property
    def decodes_here(self) -> bool:
        """Tokens after the first one are generated on this server."""
        return isinstance(self, DecodeHere) or (isinstance(self, FetchFrom) and not self.prefix)

    @property
    def moves_cached(self) -> bool:
        """KV only moves, from a prefix cache or to one: nothing is computed."""
        return (isinstance(self, SendTo) and self.cached) or (isinstance(self, FetchFrom) and self.prefix)


class DecodeHere(Route, frozen=True):
    """Compute the prompt and decode it on this server."""


class SendTo(Route, frozen=True):
    """Compute the prompt and send its KV to the decode peer that reserves the ticket."""

    ticket: str
    """Name under which the peer reserves."""

    hold: bool = False
    """Answer once the prompt is computed, and keep its KV under a lease until a peer reserves the ticket."""

    cached: bool = False
    """Compute nothing: the prefix cache has the KV of all these tokens, or the request is refused. It has no first
    token."""


class FetchFrom(Route, frozen=True):
    """Fetch the KV from a prefill server and decode on this server."""

    prefill: str
    """Name of the prefill server, as in AddPrefill."""

    ticket: str
    """Name under which the prefill server hands the KV over."""

    posting: PromptPosting = "local"
    """Who posts the prompt to the prefill server."""

    forecast: RemoteForecast | None = None
    """With compare: what the server is expected to take; None where that is not known."""

    compare: bool = False
    """Compute the prompt here where that is expected to cost less."""

    prefix: bool = False
    """The other server's prefix cache has the KV (SendTo.cached): the request ends once it is in the prefix cache here,
    whole pages of it, without a token. Only what is not cached here is fetched."""

    spare: bool = False
    """Of a prefix that comes before it is needed: it gets no more pages than its tenant may retain, and none that is
    retained gives way."""


class Discard(Route, frozen=True):
    """Compute the prompt, report the first token and drop the KV (warm-up, health probes, benchmarks)."""


AnyRoute = DecodeHere | SendTo | FetchFrom | Discard


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: no such filter
    top_p: float = 1.0  # 1: no such filter
    min_p: float = 0.0  # 0: no such filter
    seed: int | None = None
    """The same seed gives the same tokens whatever else is in the batch."""

    max_tokens: int = 16
    min_tokens: int = 0
    """No stop token is sampled before so many tokens were generated."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request. The front end adds the EOS ids, unless they are to be ignored."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated before."""

    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as often as it was generated before."""

    repetition_penalty: float = 1.0
    """Logits of tokens of the prompt and of those generated before are divided by it, negative ones multiplied."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, each once, and what is added to their logits."""

    logprobs: int | None = None
    """Alternatives reported beside each sampled token; None: no logprobs at all."""

    label_token_ids: tuple[int, ...] = ()
    """With logprobs: tokens that are reported beside each sampled token, in this order, in place of the most likely
    ones."""

    prompt_logprobs: int | None = None
    """Alternatives reported beside each prompt token; None: no logprobs at all."""

    prompt_logprobs_start: int = 0
    """The first prompt position that has logprobs."""

    hidden_states: HiddenWanted | None = None
    """Tokens whose hidden states are reported."""

    draft_top_k: int = 0
    """Most likely first tokens that are reported with their probabilities."""

    grammar: str = ""
    """Key of the constraint that the text has to match (Submit.constraint); "": none. Set by the front end."""

    @property
    def filters(self) -> bool:
        """Whether the token is drawn among the most likely ones alone."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        """Whether tokens that were seen before have other logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether any logit is changed before the token is chosen."""
        return bool(self.logit_bias) or self.penalizes

    def cacheable(self, prompt_tokens: int) -> int:
        """How many positions of a prompt of so many tokens the prefix cache may serve: the logprobs of a token are
        computed at the position before it, its hidden state at its own."""
        if self.hidden_states == "all":
            return 0
        return prompt_tokens if self.prompt_logprobs is None else max(0, self.prompt_logprobs_start - 1)


class TokenHistory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens that a request's penalties go by, as the stage that samples has to know them to begin with."""

    prompt: bytes = b""
    """Packed ids of the prompt; empty where no penalty depends on them."""
    generated: bytes = b""
    """Packed ids of the tokens that were generated before, elsewhere or before a preemption."""


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """Natural-log probability of a token, and of the most likely ones at its position, best first, or of the labels
    that were asked for (SamplingParams.label_token_ids)."""

    token: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class FirstToken(msgspec.Struct, frozen=True):
    """The first generated token, which the metadata row carries to the decode peer."""

    token: int
    prompt_tokens: int
    cached_tokens: int
    logprob: TokenLogprob | None = None
    finish_reason: str = ""
    """Why the request ends with this token; "" if decoding goes on."""

    draft: Draft | None = None
    """Draft data for a peer that has asked for it; not a part of the metadata row."""

    from_tiers: TierTokens = NONE_LOADED
    """Of cached_tokens."""

    next_position: int = 0
    """Rotary position of this token, where it is not behind as many as the prompt has tokens (mrope); 0 where it is."""


class Timing(msgspec.Struct, frozen=True):
    """Seconds that a request spent in each phase."""

    bootstrap_s: float = 0.0
    """Waiting for a peer to reserve pages."""

    queue_s: float = 0.0
    """Seconds in the waiting queue."""

    forward_s: float = 0.0
    """Seconds from the first plan to the first token; zero where the KV was fetched."""

    transfer_s: float = 0.0
    """Seconds from the first token to the last acknowledgement (prefill), or from reservation to last byte (decode)."""

    decode_s: float = 0.0
    """Generating the tokens after the first one."""

    @property
    def total_s(self) -> float:
        """The sum of the phases."""
        return self.bootstrap_s + self.queue_s + self.forward_s + self.transfer_s + self.decode_s


class Promise(msgspec.Struct, frozen=True):
    """The bound of the time to first token that a request was promised, and what it was."""

    bound_s: float
    ttft_s: float
    """From its admission, without the seconds that it waited for a peer."""

    kept: bool


class HandoffStats(msgspec.Struct, frozen=True):
    """What was sent or fetched for one request."""

    pages: int = 0
    bytes: int = 0
    """Payload, over all stages."""

    chunks: int = 0

    def plus(self, other: "HandoffStats") -> "HandoffStats":
        """What was sent or fetched in both."""
        return HandoffStats(self.pages + other.pages, self.bytes + other.bytes, self.chunks + other.chunks)


NO_HANDOFF = HandoffStats()

PREFIX = "prefix"
"""FirstToken.finish_reason of KV from a prefix cache: there is no first token."""


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache, and not computed."""

    from_tiers: TierTokens = NONE_LOADED
    """Of cached_tokens."""
