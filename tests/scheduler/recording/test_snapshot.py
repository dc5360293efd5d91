"""Snapshots: graphs of objects that come back equal, and bytes of strangers that do no harm."""

from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.lazy_heap import LazyHeap
from headrace.core.messages.orders import CancelSend
from headrace.scheduler.costs.backlog import Rank
from headrace.scheduler.kv.node import Node
from headrace.scheduler.kv.prefix_tree import PrefixTree
from headrace.scheduler.policies.policy_keyed import srpt_key
from headrace.scheduler.queues.deadlines import Deadlines, LeaseTimer
from headrace.scheduler.recording.snapshot import SnapshotError, decode, encode
from headrace.scheduler.requests.phase import Phase

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner).map(tuple) | st.frozensets(inner),
    max_leaves=6,
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(HASHABLE, inner)
        | st.sets(HASHABLE)
        | st.lists(inner).map(deque)
        | st.binary().map(bytearray)
    ),
    max_leaves=20,
)


def copied(value: Any) -> Any:
    return decode(encode(value))


@given(VALUES)
@settings(max_examples=80)
def test_values_come_back_equal_and_of_their_types(value: Any) -> None:
    found = copied(value)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple | deque)
    assert type(found) is type(value)


def test_identity_and_cycles_are_kept() -> None:
    shared: list[Any] = [1]
    value: dict[str, Any] = {"a": shared, "b": (shared, shared), "c": deque([shared], maxlen=3)}
    value["self"] = value
    shared.append((value, "a tuple in a cycle"))
    found = copied(value)
    assert found["a"] is found["b"][0] is found["b"][1] is found["c"][0]
    assert found["self"] is found is found["a"][1][0]
    assert found["c"].maxlen == 3


def test_objects_of_all_kinds_that_state_has() -> None:
    heap: LazyHeap[int, str] = LazyHeap()
    heap.put(1, (2, "x"), "item")
    value = {
        "struct": CancelSend(seq=3, request=7),
        "named": Rank((1, 0), 5),
        Phase.WAITING: Phase.RUNNING,
        "counter": Counter({"a": 2}),
        "ordered": OrderedDict([(LeaseTimer(1), 1.0), (LeaseTimer(2), 2.0)]),
        "function": srpt_key,
        "class": Node,
        "big": 1 << 100,
        "range": range(3, 9, 2),
        "heap": heap,
    }
    found = copied(value)
    assert list(found) == list(value)
    assert {key: found[key] for key in value if key != "heap"} == {key: value[key] for key in value if key != "heap"}
    assert found["heap"].first() == ((2, "x"), "item")
    assert found[Phase.WAITING] is Phase.RUNNING
    assert type(found["counter"]) is Counter


def test_bound_methods_are_those_of_the_copy() -> None:
    tree = PrefixTree(retained=1)
    found = copied(tree)
    assert found.retention._holders.__self__ is found
    found.insert(None, "", b"key1", 0)
    assert (found.pages, tree.pages) == (1, 0)


def test_deep_trees_need_no_deep_stack() -> None:
    root = node = Node(b"", -1, None, 0)
    for number in range(5_000):
        node.children[b"k"] = node = Node(b"k", number, node, number)
    found, depth = copied(root), 0
    while found.children:
        found, depth = found.children[b"k"], depth + 1
    assert depth == 5_000


def test_what_no_snapshot_can_have_is_named() -> None:
    for value, text in (
        ({"f": lambda: 1}, "lambda"),
        ([Phase.WAITING, open], "builtin_function"),
        (pytest, "module"),
        ([object()], "builtins:object"),
        (iter([1]), "list_iterator"),
    ):
        with pytest.raises(SnapshotError, match=text):
            list(encode(value))


def with_shape(kind: str, name: str, *values: Any) -> list[bytes]:
    """A snapshot of one object, as a stranger may write it."""
    return [
        msgspec.msgpack.encode([[0, 0, *values]]),
        msgspec.msgpack.encode([[[kind, name, ["a"] * len(values)]], 1, [0]]),
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "builtins:eval", "headrace.core.runtime.process:module_command", "subprocess:Popen"),
        *("headrace.server.launch.serve:serve", "headrace.scheduler.loop:SchedulerLoop", "headrace.core:config"),
        *("headrace.scheduler.recording.store:RecordingStore", "headrace.core.runtime.forked:Forked"),
        *("headrace.scheduler.kv.node:NONE", "headrace.scheduler.kv.node:Node.__init__.__globals__", ":", "a", ""),
    ],
)
def test_only_classes_and_functions_of_the_scheduler_are_named(name: str) -> None:
    for kind in ("object", "struct", "enum", "named"):
        with pytest.raises(SnapshotError):
            decode(with_shape(kind, name, 1))
    for kind in ("class", "function"):
        with pytest.raises(SnapshotError):
            decode(with_shape(kind, "", name))


def test_functions_of_core_are_no_functions_of_a_snapshot() -> None:
    with pytest.raises(SnapshotError):
        decode(with_shape("function", "", "headrace.core.types.packed:pack"))


def test_attributes_that_are_code_are_not_set() -> None:
    with pytest.raises(SnapshotError):
        decode(with_shape("object", "headrace.scheduler.requests.record:Request", 1))


@given(st.data())
@settings(max_examples=200)
def test_damaged_snapshots_are_errors(data: st.DataObject) -> None:
    deadlines = Deadlines()
    deadlines.set(LeaseTimer(1), 5.0)
    blocks = list(encode([deadlines, {"a": (1, [2])}, Phase.WAITING]))
    at = data.draw(st.integers(0, len(blocks) - 1))
    block = bytearray(blocks[at])
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    blocks[at] = bytes(block)
    problem = ""
    try:
        decode(blocks)
    except SnapshotError as error:
        problem = str(error)
    assert "\n" not in problem


def test_a_class_with_other_attributes_is_told() -> None:
    with pytest.raises(SnapshotError, match="CancelSend has other attributes in this version"):
        decode(with_shape("struct", "headrace.core.messages.orders:CancelSend", 1))


def test_texts_are_replaced_where_they_stand() -> None:
    assert decode(encode(["a", {"a": ("b",)}]), {"a": "x"}) == ["x", {"x": ("b",)}]


def test_rules_replace_attributes() -> None:
    rules = {CancelSend: {"request": lambda order: order.request + 1}}
    assert decode(encode([CancelSend(seq=1, request=1)], rules)) == [CancelSend(seq=1, request=2)]
