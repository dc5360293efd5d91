"""Chooses a replica for each prompt, and keeps what is known of the replicas. Pure: time and randomness come in.

prompt ─► page names ─► holders of its longest prefixes, and some others ─► least score ─► Sent
              ▲                         ▲                                       ▲
              │ KV events ──────────────┘ HolderIndex                           │ ReplicaLoad ◄── reports
              └──────────────── sent ─────────────────────────────────────────────────┘

Without any report work is counted in tokens, which compare as seconds would on equal machines.
"""

import random
from collections.abc import Iterable, Sequence

from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventMessage
from headrace.core.types.kv.page_digests import page_digest, root_digest
from headrace.core.types.packed import ITEM_BYTES, packed_length
from headrace.core.types.requests.images import ImageInput, page_key
from headrace.core.types.requests.remote_prefill import RemoteForecast
from headrace.scheduler.kv.cache_events import short
from headrace.server.routing.holders import SENT_S, HolderIndex
from headrace.server.routing.replica_load import LoadReport, ReplicaLoad, Sent, work
from headrace.server.routing.score import Candidate, best, shortlist

TOKENS = (0.0, 1.0)  # cost while none is known
HOST_SHARE, DISK_SHARE = 0.5, 2.0  # of computing a page at the beginning of a prompt, that loading one takes
PAGE_SIZE = 64  # tokens of the pages of replicas that do not tell theirs


class ReplicaRouter:
    """Scores replicas, which are numbers from 0."""

    def __init__(self, replicas: int, rng: random.Random, sent_s: float = SENT_S) -> None:
        """sent_s: seconds for which the pages of a prompt are looked for where it was sent."""
        self._rng = rng
        self._index = HolderIndex(sent_s)
        self._loads = [ReplicaLoad() for _ in range(replicas)]
        self._page_sizes = [PAGE_SIZE] * replicas
        self._avoided = [0.0] * replicas
        self._cost = TOKENS  # last reported by any of them

    def choose(
        self, prompt: bytes, salt: str, replicas: Sequence[int], now: float, images: Sequence[ImageInput] = ()
    ) -> Sent:
        """Send a packed prompt to one of these replicas, of which there is at least one; done() has to follow."""
        replicas = self._preferred(replicas, now)
        sizes = {self._page_sizes[number] for number in replicas}
        names = {size: page_names(prompt, salt, size, images) for size in sizes}
        lengths = self._prefixes(names, replicas, now)
        listed = shortlist(_by_length(lengths), replicas, self._rng)
        tokens = len(prompt) // ITEM_BYTES
        candidates = [
            self._candidate(number, names[self._page_sizes[number]], lengths.get(number, 0), tokens, now)
            for number in listed
        ]
        chosen = listed[best(candidates)]
        new = self._index.sent(chosen, names[self._page_sizes[chosen]], now)
        sent = Sent(chosen, work(lengths.get(chosen, 0), tokens), tokens, new)
        self._loads[chosen].sent(sent)
        return sent

    def least_loaded(self, tokens: int, replicas: Sequence[int], now: float) -> Sent:
        """Send a prompt of so many tokens to the replica with the fewest prompt tokens of this router that are not
        done; done() has to follow."""
        chosen = min(self._preferred(replicas, now), key=lambda number: self._loads[number].prompt_tokens)
        sent = Sent(chosen, work(0, tokens), tokens)
        self._loads[chosen].sent(sent)
        return sent

    def forecast(self, sent: Sent, now: float) -> RemoteForecast | None:
        """What the replica is expected to take for the prompt; None where it has not said what computing costs it."""
        return self._loads[sent.replica].forecast(sent, now)

    def withdraw(self, sent: Sent) -> None:
        """The prompt does not go to its replica: it is computed where it is decoded."""
        self.done(sent)
        self._index.forget(sent.replica, sent.pages)

    def handed_over(self, sent: Sent, seconds: float) -> None:
        """The replica's KV of the prompt is here. seconds: what that took beside the replica's queue and computing."""
        self._loads[sent.replica].handoffs.observe(sent.work.tokens, seconds)

    def posted(self, sent: Sent, now: float) -> None:
        """The prompt leaves for its replica now."""
        sent.posted_at = now

    def done(self, sent: Sent) -> None:
        """The prompt is answered, or not waited for any more. No effect the second time."""
        self._loads[sent.replica].done(sent)

    def reported(self, replica: int, report: LoadReport, asked_at: float, now: float) -> None:
        """A replica has answered with its load."""
        self._loads[replica].reported(report, asked_at, now)
        self._cost = report.cost

    def paged(self, replica: int, page_size: int) -> None:
        """A replica has pages of so many tokens."""
        if page_size != self._page_sizes[replica]:
            self._page_sizes[replica] = page_size
            self._index.clear(replica)

    def avoid(self, replica: int, until: float) -> None:
        """Choose this replica only if there is no other before this time: it has failed a prompt."""
        self._avoided[replica] = until

    def reset(self, replica: int) -> None:
        """The replica was started again: forget its cache and its load."""
        self._index.clear(replica)
        self._loads[replica].forget()

    def forget_cache(self, replica: int) -> None:
        """Forget which pages the replica holds."""
        self._index.clear(replica)

    def apply(self, replica: int, events: Iterable[KvEventMessage]) -> None:
        """KV events of a replica, in order."""
        for event in events:
            match event:
                case BlockStored():
                    self._index.stored(replica, event.block_hashes, event.medium)
                case BlockRemoved():
                    self._index.removed(replica, event.block_hashes, event.medium)
                case AllBlocksCleared():
                    self._index.clear(replica)

    def _preferred(self, replicas: Sequence[int], now: float) -> Sequence[int]:
        """Those that are not to be avoided, if there are any."""
        return [number for number in replicas if self._avoided[number] <= now] or replicas

    def _prefixes(self, names: dict[int, list[int]], replicas: Sequence[int], now: float) -> dict[int, int]:
        """Tokens of the prompt that each holder has, for those that have any."""
        lengths: dict[int, int] = {}
        for size, pages in names.items():
            allowed = 0
            for number in replicas:
                if self._page_sizes[number] == size:
                    self._index.expire(number, now)
                    allowed |= 1 << number
            for length, holders in self._index.prefixes(pages, allowed):
                lengths.update(dict.fromkeys(holders, length * size))
        return lengths

    def _candidate(self, replica: int, pages: list[int], cached: int, tokens: int, now: float) -> Candidate:
        load, size = self._loads[replica], self._page_sizes[replica]
        cost = self._cost if load.report is None else load.report.cost
        host, disk = self._index.tier_pages(replica, pages[: cached // size])
        return Candidate(
            queued_s=load.queued_s(cost, now),
            uncached_s=work(cached, tokens).seconds(cost),
            load_s=cost[1] * size * (HOST_SHARE * host + DISK_SHARE * disk),
        )


def _by_length(lengths: dict[int, int]) -> list[list[int]]:
    """Replicas with equally long prefixes, longest first."""
    groups: dict[int, list[int]] = {}
    for replica, length in lengths.items():
        groups.setdefault(length, []).append(replica)
    return [groups[length] for length in sorted(groups, reverse=True)]


def page_names(prompt: bytes, salt: str, page_size: int, images: Sequence[ImageInput] = ()) -> list[int]:
    """64-bit names of the full pages of a packed prompt, as KV events carry them: the same prefix has the same names on
    every server. Without the page of its last token, which is always computed."""
    digest, names = root_digest(salt.encode()), []
    for end in range(page_size, packed_length(prompt), page_size):
        digest = page_digest(digest, page_key(prompt, end - page_size, page_size, images))
        names.append(short(digest))
    return names
