"""What computing a prompt is expected to take decode engines, from what they say of themselves. Pure.

    GET /metrics, twice   prompt tokens computed there / seconds of prefill       how long a token takes
    GET /metrics          requests that run and wait                              whom a prompt delays
    KV events             token ids of blocks that are in the prefix cache        what of a prompt is not computed
    (without them)        prompts that were handed over or left to one engine lately

The router has chosen a decode engine, and does not say which: a prompt is left to them only where that is cheaper
whichever it is.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventMessage
from headrace.core.types.kv.page_digests import page_digest, root_digest
from headrace.core.types.packed import ITEM_BYTES, pack
from headrace.core.types.requests.remote_prefill import LocalForecast
from headrace.scheduler.costs.decoding_load import DecodingLoad
from headrace.scheduler.kv.cache_events import short
from headrace.server.routing.holders import HolderIndex
from headrace.server.routing.replica_router import page_names

LEAST_TOKENS = 64  # of the mean prompt that an engine has computed between two looks; shorter ones say little
FORGETTING = 0.8  # weight of a look when the next one comes
_SAMPLE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{[^}\n]*\})? ([0-9.e+-]+)$", re.MULTILINE)


class EngineCounts(msgspec.Struct, frozen=True):
    """What GET /metrics of an engine says."""

    running: float = 0.0
    waiting: float = 0.0
    ended: float = 0.0
    """Requests that have ended since its start."""

    prefill_s: float = 0.0
    """Seconds that these were being prefilled, added up."""

    computed_tokens: float = 0.0
    """Their prompts' tokens that were neither cached nor handed over. (vLLM's prompt_tokens_by_source has those of
    prompts that are being computed, too.)"""

    @classmethod
    def parse(cls, text: str) -> "EngineCounts":
        """From Prometheus' text format; sums over its labels."""
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        names = {
            "running": "num_requests_running",
            "waiting": "num_requests_waiting",
            "ended": "request_prefill_time_seconds_count",
            "prefill_s": "request_prefill_time_seconds_sum",
            "computed_tokens": "request_prefill_kv_computed_tokens_sum",
        }
        return cls(**{field: found.get(name, 0.0) for field, name in names.items()})


class EngineCost:
    """One decode engine. rate: prompt tokens a second that it computes; 0: learnt."""

    def __init__(self, page_size: int, rate: float = 0.0) -> None:
        self._page_size = page_size
        self._rate = rate
        self._counts: EngineCounts | None = None
        self._tokens = self._seconds = self._prefills = 0.0
        self._decoding = DecodingLoad()
        self._index = HolderIndex()
        self._digests: dict[int, bytes] = {}  # by the engine's own name of a block: the digest that names it here

    def take(self, text: str, now: float) -> None:
        """Note what GET /metrics says; "" if it has not answered."""
        if not text:
            return
        counts = EngineCounts.parse(text)
        before, self._counts = self._counts, counts
        if before is None or counts.ended < before.ended:  # it was started, for the first time or again
            self._decoding.changed(counts.running, 0.0, now)
            return
        ended = counts.ended - before.ended
        self._decoding.changed(counts.running, ended, now)
        tokens = counts.computed_tokens - before.computed_tokens
        if ended and tokens >= LEAST_TOKENS * ended:
            self._tokens = FORGETTING * self._tokens + tokens
            self._seconds = FORGETTING * self._seconds + counts.prefill_s - before.prefill_s
            self._prefills = FORGETTING * self._prefills + ended

    def apply(self, events: Iterable[KvEventMessage]) -> None:
        """KV events of the engine, in order. Blocks of prompts with a salt, an adapter or images are not followed:
        their parents are not known, or they are not named by tokens alone."""
        for event in events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    known = [digest for name in event.block_hashes if (digest := self._digests.pop(name, None))]
                    self._index.removed(0, [short(digest) for digest in known], "GPU")
                case AllBlocksCleared():
                    self.forget()

    def forget(self) -> None:
        """Nothing is known of its prefix cache."""
        self._digests.clear()
        self._index.clear(0)

    def sent(self, tokens: Sequence[int], now: float) -> None:
        """The engine has a prompt, or its KV, now or soon."""
        self._index.sent(0, page_names(pack(tokens), "", self._page_size), now)

    def cached(self, tokens: Sequence[int], now: float) -> int:
        """Leading tokens of a prompt that its prefix cache is known to have."""
        self._index.expire(0, now)
        names = page_names(pack(tokens), "", self._page_size)
        return next((length * self._page_size for length, _ in self._index.prefixes(names, 1)), 0)

    def forecast(self, tokens: Sequence[int], salt: str, now: float) -> LocalForecast | None:
        """What computing a prompt is expected to take it; None while it is not known how fast it is. salt: prompts with
        one are not looked for in its cache."""
        token_s = 1 / self._rate if self._rate else self._seconds / self._tokens if self._tokens else None
        if token_s is None or self._counts is None:
            return None
        cached = 0 if salt else self.cached(tokens, now)
        work_s = token_s * (len(tokens) - cached)
        mean_s = self._seconds / self._prefills if self._prefills else work_s
        return LocalForecast(
            self._counts.waiting * mean_s + work_s,
            work_s,
            self._decoding.delayed(work_s, now) + self._counts.waiting,
            cached / len(tokens),
        )

    def _stored(self, event: BlockStored) -> None:
        parent = root_digest(b"") if event.parent_block_hash is None else self._digests.get(event.parent_block_hash)
        whole = len(event.token_ids) == len(event.block_hashes) * event.block_size
        if parent is None or not whole or event.block_size != self._page_size or event.lora_name is not None:
            return
        packed, step = pack(event.token_ids), event.block_size * ITEM_BYTES
        for number, name in enumerate(event.block_hashes):
            parent = self._digests[name] = page_digest(parent, packed[number * step : (number + 1) * step])
        self._index.stored(0, [short(self._digests[name]) for name in event.block_hashes], "GPU")


def dearest(forecasts: Iterable[LocalForecast | None]) -> LocalForecast | None:
    """The forecast of the engine where a prompt costs most; None if one of them, or all, are not known."""
    found = list(forecasts)
    known = [forecast for forecast in found if forecast is not None]
    return max(known, key=lambda forecast: forecast.cost_s) if known and len(known) == len(found) else None
