"""The prefix tree and the leases, against naive models that keep every prefix."""

from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.config.scheduler import Eviction
from headrace.core.types.packed import pack
from headrace.core.types.requests.images import ImageInput
from headrace.scheduler.kv.kv_cache import KvCache, Lease
from headrace.scheduler.kv.node import Node
from headrace.scheduler.kv.prefix_tree import PrefixTree
from tests.scheduler.growth import grown_bytes

KEYS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=5)
SALTS = st.sampled_from(["", "x"])


def inserted(tree: PrefixTree, parent: Node | None, salt: str, key: bytes, page: int) -> Node:
    """A page that a request has added and left."""
    node = tree.insert(parent, salt, key, page)
    tree.unlock_unused([node])
    return node


@given(st.lists(st.tuples(SALTS, KEYS), max_size=20), SALTS, KEYS)
def test_match_is_the_longest_known_prefix(
    prompts: list[tuple[str, list[bytes]]], salt: str, keys: list[bytes]
) -> None:
    tree = PrefixTree()
    known: dict[tuple[str, tuple[bytes, ...]], int] = {}
    for where, path in prompts:
        parent = None
        for depth, key in enumerate(path, 1):
            name = (where, tuple(path[:depth]))
            node = tree.child(parent, where, key)
            assert (node is not None) == (name in known)
            if node is None:
                known[name] = len(known)
                node = inserted(tree, parent, where, key, known[name])
            parent = node
    depth = 0
    while depth < len(keys) and (salt, tuple(keys[: depth + 1])) in known:
        depth += 1
    expected = [known[(salt, tuple(keys[: index + 1]))] for index in range(depth)]
    assert [node.page for node in tree.match(keys, salt)] == expected
    assert tree.pages == tree.unlocked == len(known)


def test_eviction_takes_the_least_recently_used_leaf_and_no_locked_one() -> None:
    tree = PrefixTree()
    root = inserted(tree, None, "", b"root", 0)
    inserted(tree, root, "", b"old", 1)
    new = inserted(tree, root, "", b"new", 2)
    tree.lock([root, new])
    assert tree.unlocked == 1
    assert tree.evict(5) == [1]
    tree.unlock([root, new])
    inserted(tree, root, "", b"old", 3)
    tree.lock([root, new])
    tree.unlock([root, new])  # used after old
    assert tree.evict(1) == [3], "old"
    assert tree.evict(5) == [2, 0], "a parent goes after its last child"
    assert tree.pages == 0
    with pytest.raises(ValueError, match="unlocked more often"):
        tree.unlock([root])


def test_a_path_is_dropped_up_to_a_node_in_use() -> None:
    tree = PrefixTree()
    root = inserted(tree, None, "", b"root", 0)
    mine = inserted(tree, root, "", b"mine", 1)
    last = inserted(tree, mine, "", b"last", 2)
    tree.lock([root, mine, last])
    tree.unlock([root, mine, last])
    assert tree.drop([root, mine, last, inserted(tree, last, "", b"more", 3)]) == [3, 2, 1, 0]
    assert (tree.pages, tree.unlocked, tree.match([b"root"], "")) == (0, 0, [])
    assert tree.evict(9) == [], "dropped nodes are not evicted again"
    root = inserted(tree, None, "", b"root", 4)
    mine, theirs = inserted(tree, root, "", b"mine", 5), inserted(tree, root, "", b"theirs", 6)
    tree.lock([root, theirs])
    assert tree.drop([root, mine]) == [5]
    assert tree.drop([root, theirs]) == []
    tree.unlock([root, theirs])
    assert tree.evict(9) == [6, 4]


def test_the_candidates_for_eviction_do_not_pile_up() -> None:
    tree = PrefixTree()
    node = inserted(tree, None, "", b"k", 0)
    for _ in range(1000):
        tree.lock([node])
        tree.unlock([node])
    assert len(tree.retention._order) == 1


PAGE = 2
IMAGES = st.lists(
    st.builds(
        lambda file, start, length: ImageInput(file * 32, start, length, 1, length),
        st.sampled_from(["aa", "bb"]),
        st.integers(0, 7),
        st.integers(1, 4),
    ),
    max_size=2,
)


class Prompt(NamedTuple):
    tokens: list[int]
    salt: str
    images: list[ImageInput]

    def upto(self, pages: int) -> Any:
        """What is on so many pages: tokens, and the images that begin there."""
        end = pages * PAGE
        return self.salt, tuple(self.tokens[:end]), tuple(image for image in self.images if image.start < end)


class Leases(RuleBasedStateMachine):
    """Random leases on a small pool. contents: what each page holds; a published page must never change."""

    @initialize(pages=st.integers(1, 12), eviction=st.sampled_from(["lru", "turns"]))
    def start(self, pages: int, eviction: Eviction) -> None:
        self.cache = KvCache(pages, PAGE, eviction=eviction, short_tokens=PAGE)
        self.leases: list[tuple[Lease, Prompt]] = []
        self.contents: dict[int, Any] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), salt=SALTS, images=IMAGES, extra=st.integers(0, 3)
    )
    def acquire(self, tokens: list[int], salt: str, images: list[ImageInput], extra: int) -> None:
        free, cached = self.cache.free, self.cache.cached
        prompt = Prompt(tokens, salt, images)
        lease = self.cache.acquire(pack(tokens), salt, images, extra=extra)
        needed = -(-(len(tokens) + extra) // PAGE)
        if lease is None:
            assert needed > free + cached - (len(tokens) // PAGE)
            assert (self.cache.free, self.cache.cached) == (free, cached), "a refusal changes nothing"
            return
        assert len(lease.pages) == needed
        assert lease.matched * PAGE < len(tokens), "the last token is always computed"
        for index in range(lease.matched):
            assert self.contents[lease.pages[index]] == prompt.upto(index + 1)
        for index in range(lease.matched, needed):
            self.contents.pop(lease.pages[index], None)
        self.leases.append((lease, prompt))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        lease, prompt = data.draw(st.sampled_from(self.leases))
        computed = data.draw(st.integers(0, len(prompt.tokens)))
        for index in range(lease.matched, len(prompt.tokens) // PAGE):
            if index >= len(lease.path):
                self.contents[lease.pages[index]] = prompt.upto(index + 1)
        self.cache.publish(lease, pack(prompt.tokens), computed)
        assert len(lease.path) >= computed // PAGE

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), more=st.integers(0, 6))
    def grow(self, data: st.DataObject, more: int) -> None:
        lease, (tokens, *_) = data.draw(st.sampled_from(self.leases))
        before = list(lease.pages)
        if self.cache.grow(lease, len(tokens) + more):
            assert len(lease.pages) >= -(-(len(tokens) + more) // PAGE)
            for page in lease.pages[len(before) :]:
                self.contents.pop(page, None)
        assert list(lease.pages[: len(before)]) == before

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.leases))
        self.leases.remove(entry)
        entry[0].nonfinite = data.draw(st.booleans())
        self.cache.release(entry[0])
        with pytest.raises(ValueError, match="already ended"):
            self.cache.release(entry[0])

    @invariant()
    def cache_is_consistent(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.check() == []
        assert self.cache.free + self.cache.cached + self.cache.leased == self.cache.total
        if not self.leases:
            assert self.cache.leased == 0


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_equal_page_stays_private_and_later_pages_go_below_it() -> None:
    cache = KvCache(8, PAGE)
    first = cache.acquire(pack([1, 2, 3]), "")
    second = cache.acquire(pack([1, 2, 5, 6, 7]), "")
    assert first is not None
    assert second is not None
    cache.publish(first, pack([1, 2, 3]), 3)
    cache.publish(second, pack([1, 2, 5, 6, 7]), 5)
    assert second.path[0] is first.path[0]
    assert second.path[0].page != second.pages[0]
    cache.release(first)
    cache.release(second)
    assert (cache.free, cache.cached) == (6, 2)
    third = cache.acquire(pack([1, 2, 5, 6]), "")
    assert third is not None
    assert third.matched == 1, "the last token has to be computed"


def test_only_full_pages_are_published() -> None:
    cache = KvCache(8, 4)
    tokens = pack(range(7))
    lease = cache.acquire(tokens, "")
    assert lease is not None
    cache.publish(lease, tokens, 7)
    assert len(lease.path) == 1
    cache.publish(lease, tokens, 3)
    assert len(lease.path) == 1


@given(st.integers(0, 2**32))
def test_a_lease_that_keeps_a_prefix_publishes_no_page_behind_it(seed: int) -> None:
    """Whatever chunks it is computed in, and whatever of it is in the tree by others; all its own pages come back."""
    random = Random(seed)
    cache = KvCache(64, 4)
    trunk = [random.randrange(3) for _ in range(40)]
    for _ in range(8):
        tokens = pack([*trunk[: random.randrange(40)], *(random.randrange(3) for _ in range(random.randrange(1, 9)))])
        length = len(tokens) // 4
        keep = random.randrange(length + 4)
        before = cache.cached_positions(tokens, "")
        lease = cache.acquire(tokens, "", keep=keep)
        assert lease is not None
        done = lease.matched * 4
        while done < length:
            done = min(length, done + random.randrange(1, 20))
            cache.publish(lease, tokens, done)
            assert cache.check() == []
        cache.release(lease)
        whole = (length - 1) // 4 * 4
        assert cache.cached_positions(tokens, "") == max(before, min(keep // 4 * 4, whole))
        assert (cache.check(), cache.leased) == ([], 0)


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    cache = KvCache(4, PAGE, prefix_cache=False)
    lease = cache.acquire(pack([1, 2, 3]), "")
    assert lease is not None
    cache.publish(lease, pack([1, 2, 3]), 3)
    cache.release(lease)
    assert (cache.free, cache.cached) == (4, 0)


def test_pages_that_leave_otherwise_than_by_eviction_take_up_no_memory() -> None:
    """The pool is never full, so that no candidate for eviction comes up."""
    tree = PrefixTree()

    def serve(number: int) -> None:
        first = inserted(tree, None, f"salt {number}", b"a", 0)
        path = [first, inserted(tree, first, "", b"b", 1)]
        tree.lock(path)
        tree.unlock(path)
        assert tree.drop(path) == [1, 0]

    assert grown_bytes(serve) < 50_000
