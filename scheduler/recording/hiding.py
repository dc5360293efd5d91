"""Hidden tokens: each token id replaced by another one of the vocabulary, the same one throughout a recording. Pure.

The scheduler compares token ids, and nothing else, so that it decides the same with others in their places: what it was
given, what it has and what it orders are all written so. The permutation follows from a key that is not written, and is
another in every recording. Cache salts, constraints and digests of images and prompts are keyed hashes.

It is a substitution: who has the file knows where equal tokens are, and may guess frequent ones. No text can be read
from it; it is no cipher.
"""

import copy
import heapq
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from headrace.core.messages.frontend import KvHint, QueryPrefix, Submit
from headrace.core.messages.kv_events import BlockStored
from headrace.core.messages.orders import PlanRow
from headrace.core.messages.replies import Tokens
from headrace.core.messages.stage_events import RecordingStopped, SampledToken
from headrace.core.types.kv.kv_files import KvFile
from headrace.core.types.packed import ITEM_BYTES, pack, prompt_hash, unpack
from headrace.core.types.requests.adapters import BEYOND_CLIENTS
from headrace.core.types.requests.constraint import Constraint, GrammarStart
from headrace.core.types.requests.draft import DraftTokens
from headrace.core.types.requests.images import ImageInput
from headrace.core.types.requests.prompt_logprobs import LogprobRun, pack_runs
from headrace.core.types.requests.request import PREFIX, FirstToken, SamplingParams, TokenHistory, TokenLogprob
from headrace.core.types.requests.reservation import Reservation
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.kv.conversations import Conversations
from headrace.scheduler.kv.kv_cache import Lease, PagePrefetch
from headrace.scheduler.kv.node import Node
from headrace.scheduler.kv.prefix_tree import PrefixTree
from headrace.scheduler.policies.policy_keyed import KeyedPolicy
from headrace.scheduler.policies.tenants import TenantLevels, Tenants
from headrace.scheduler.recording.digest import BULK
from headrace.scheduler.recording.rewriting import Rewriter
from headrace.scheduler.recording.snapshot import Rules
from headrace.scheduler.requests.record import Request

HIDDEN_HASH = "hidden:"
"""How the hash of a prompt is written: Hiding.aliases() says which prompt of the file it is that of."""

_FINGERPRINT_CHARS = 32  # of an adapter
_IMAGE_BYTES = 32 + 2 * ITEM_BYTES  # of an image in the key of a page
_SALTED = "salt "  # how the heap of a cache salt is named

BULK_EVENTS: Rules = {**BULK, RecordingStopped: {"spans": lambda _event: b""}}
"""Bytes of events that are not written."""


class Hiding:
    """Replaces the token ids of one recording."""

    def __init__(self, key: bytes, vocab_size: int, page_size: int) -> None:
        """key: secret, 32 bytes. vocab_size: ids outside of it, which no request is let in with, stay."""
        self._key = key
        order = sorted(range(vocab_size), key=lambda token: self._hash(b"token", token.to_bytes(4, "little")))
        self._table = array("i", bytes(ITEM_BYTES * vocab_size))
        for place, token in enumerate(order):
            self._table[token] = place
        self._page_bytes = page_size * ITEM_BYTES
        self.rules = self._rules()
        """For events and state."""

        self.effects = Rewriter(self.rules)
        """Hides tokens of effects."""

    def token(self, token: int) -> int:
        """What one id is replaced by."""
        return self._table[token] if 0 <= token < len(self._table) else token

    def tokens(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """The same for several."""
        return tuple(map(self.token, tokens))

    def packed(self, data: bytes | bytearray) -> bytes:
        """The same for packed ids. Bytes that are none stay: they are refused."""
        if not data or len(data) % ITEM_BYTES:
            return bytes(data)
        ids, table = unpack(bytes(data)), self._table
        if min(ids) < 0 or max(ids) >= len(table):
            return pack(map(self.token, ids))
        return pack(map(table.__getitem__, ids))

    def page(self, key: bytes) -> bytes:
        """The key of a page: its tokens, and the digests and places of its images."""
        size, images = self._page_bytes, b""
        for at in range(size, len(key), _IMAGE_BYTES):
            images += self._hash(b"image", key[at : at + 32].hex().encode()) + key[at + 32 : at + _IMAGE_BYTES]
        return self.packed(key[:size]) + images

    def salt(self, salt: str) -> str:
        """A cache salt, or one that is apart for an adapter, whose fingerprint stays."""
        if salt.startswith(BEYOND_CLIENTS):
            end = len(BEYOND_CLIENTS) + _FINGERPRINT_CHARS
            return salt[:end] + self.salt(salt[end:])
        return self.text(salt)

    def text(self, text: str) -> str:
        """A text that is compared only, in hexadecimal; "" stays."""
        return text and self._hash(b"text", text.encode()).hex()[:32]

    def image(self, digest: str) -> str:
        """The digest of an image, in hexadecimal."""
        return self._hash(b"image", digest.encode()).hex()

    def prompt_hash(self, found: str) -> str:
        """The hash of a prompt; "" stays."""
        return found and f"{HIDDEN_HASH}{self._hash(b'prompt', found.encode()).hex()}"

    def aliases(self, prompts: Iterable[Submit]) -> dict[str, str]:
        """The hashes of hidden prompts, by what is written in the place of the hashes of the prompts themselves."""
        found = {}
        for each in prompts:
            own = prompt_hash(each.prompt, each.terms.image_digest)
            digest = each.terms.image_digest and self.text(each.terms.image_digest)
            found[self.prompt_hash(own)] = prompt_hash(self.packed(each.prompt), digest)
        return found

    def _hash(self, kind: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=32, key=self._key, person=kind).digest()

    def _rules(self) -> Rules:
        hide = self
        messages: Rules = {
            Submit: {"prompt": lambda one: hide.packed(one.prompt)},
            KvHint: {"prompt": lambda one: hide.packed(one.prompt)},
            QueryPrefix: {"prompt": lambda one: hide.packed(one.prompt), "salt": lambda one: hide.salt(one.salt)},
            RequestTerms: {
                "cache_salt": lambda one: hide.salt(one.cache_salt),
                "image_digest": lambda one: hide.text(one.image_digest),
            },
            ImageInput: {"digest": lambda one: hide.image(one.digest), "pixels": lambda _one: b""},
            SamplingParams: {
                "stop_token_ids": lambda one: hide.tokens(one.stop_token_ids),
                "label_token_ids": lambda one: hide.tokens(one.label_token_ids),
                "logit_bias": lambda one: tuple([(hide.token(token), bias) for token, bias in one.logit_bias]),
                "grammar": lambda one: hide.text(one.grammar),
            },
            Constraint: {"text": lambda one: hide.text(one.text)},
            GrammarStart: {"tokens": lambda one: hide.packed(one.tokens)},
            TokenHistory: {
                "prompt": lambda one: hide.packed(one.prompt),
                "generated": lambda one: hide.packed(one.generated),
            },
            KvFile: {"tokens": lambda one: hide.packed(one.tokens)},
            FirstToken: {"token": lambda one: one.token if one.finish_reason == PREFIX else hide.token(one.token)},
            SampledToken: {"token": lambda one: hide.token(one.token)},
            TokenLogprob: {
                "token": lambda one: hide.token(one.token),
                "top_ids": lambda one: hide.tokens(one.top_ids),
            },
            LogprobRun: {"packed": lambda one: hide._logprobs(one)},
            DraftTokens: {"ids": lambda one: hide.tokens(one.ids)},
            PlanRow: {
                "tokens": lambda one: hide.packed(one.tokens),
                "next_token": lambda one: None if one.next_token is None else hide.token(one.next_token),
            },
            Tokens: {"tokens": lambda one: hide.tokens(one.tokens)},
            BlockStored: {"token_ids": lambda one: hide.tokens(one.token_ids)},
            Reservation: {"prompt_hash": lambda one: hide.prompt_hash(one.prompt_hash)},
        }
        state: Rules = {
            Request: {"tokens": lambda one: bytearray(hide.packed(one.tokens))},
            Node: {
                "key": self._key_of,
                "digest": lambda one: one.digest and hide._hash(b"digest", one.digest),
                "children": lambda one: {hide.page(key): child for key, child in one.children.items()},
            },
            PrefixTree: {"_roots": lambda one: {self._key_of(root): root for root in one._roots.values()}},
            Lease: {"salt": lambda one: hide.salt(one.salt)},
            PagePrefetch: {"tokens": lambda one: hide.packed(one.tokens), "salt": lambda one: hide.salt(one.salt)},
            Conversations: {
                "_conversations": lambda one: {
                    (tenant, hide.salt(salt), name): found for (tenant, salt, name), found in one._conversations.items()
                },
            },
            TenantLevels: {"_salts": lambda one: self._tenants(one._salts)},
            KeyedPolicy: {
                "_heaps": lambda one: {self._heap(name): heap for name, heap in one._heaps.items()},
                "_place": lambda one: {arrival: self._heap(name) for arrival, name in one._place.items()},
            },
        }
        return {**BULK_EVENTS, **messages, **state}

    def _key_of(self, node: Node) -> bytes:
        return self.page(node.key) if node.parent is not None else self.salt(node.key.decode()).encode()

    def _heap(self, name: str) -> str:
        salt = name.removeprefix(_SALTED)
        return f"{_SALTED}{self.salt(salt)}" if salt != name else name

    def _tenants(self, tenants: Tenants) -> Tenants:
        """Counters of cache salts."""
        found, hide = copy.copy(tenants), self.salt
        found._queued = {hide(salt): count for salt, count in tenants._queued.items()}
        found._served = {hide(salt): served for salt, served in tenants._served.items()}
        found._active = active = copy.copy(tenants._active)
        active._current = {hide(salt): entry for salt, entry in active._current.items()}
        active._heap = [
            ((served, hide(salt)), entry, hide(name), hide(item)) for (served, salt), entry, name, item in active._heap
        ]
        heapq.heapify(active._heap)
        return found

    def _logprobs(self, run: LogprobRun) -> bytes:
        entries: Sequence[Any] = [self.effects(entry) for entry in run.entries()]
        return b"".join(part.packed for part in pack_runs(run.start, entries, max(1, run.count)))


class Plain:
    """Hides nothing: for recordings with token ids."""

    rules: Rules = BULK_EVENTS

    @staticmethod
    def effects(effect: Any) -> Any:
        """The effect."""
        return effect

    @staticmethod
    def aliases(_prompts: Iterable[Submit]) -> dict[str, str]:
        """None are needed."""
        return {}
