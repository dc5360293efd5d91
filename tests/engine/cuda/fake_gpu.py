"""A GPU that is not there: torch code for device "cuda" runs on fake tensors, on a torch without CUDA or a driver.

    with FakeGpu(guard) as gpu:
        ...                     code that says device="cuda"
        with gpu.counted() as counts:
            ...
    counts.launches, counts.bytes, counts.syncs, gpu.races

    operation ──► FakeGpu: counts it, orders its uses of memory ──► FakeTensorMode: device, dtype, shape of the result

Floating-point tensors have no values. Those of integers and booleans keep theirs as long as they follow from the host's
(indices of a pass do, choices of a router do not), so that pages of a pool are told apart. A wrong device, dtype or
shape is an error of torch itself; counted or found here are

    launches     operations on the device, each with its line
    syncs        what makes the host wait for the device, each with its line
    races        uses of the same memory by two streams, or a stream and the host, without an event between them
"""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.engine.cuda.clocks import HOST, Clock, Clocks, Race, Unit

ROOT = Path(__file__).parents[3]
OURS = tuple(f"{ROOT / name}/" for name in ("engine", "transfer", "scheduler", "peer"))
TOTAL_BYTES = 80 << 30
PROPERTIES = SimpleNamespace(name="No GPU", major=9, minor=0)
# Operations whose results have no values yet, and all that launch nothing.
NO_VALUES = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
FREE = {*NO_VALUES, "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "is_pinned", "set_", "resize_"}
# Composite operations that a GPU computes in one kernel.
WHOLE = frozenset(("aten::scaled_dot_product_attention",))
COPIES = ("copy_", "_to_copy")
BY_ROWS = ("index_select", "index_copy_", "index", "index_put_")
MOST_VALUES = 1 << 22  # elements of an integer tensor whose values are kept


class Counts:
    """What happened on the device within some time."""

    def __init__(self) -> None:
        self.launches: Counter[tuple[str, str]] = Counter()
        """By operation and line."""
        self.moved: Counter[str] = Counter()
        """Bytes read and written in device memory, by operation."""
        self.syncs: Counter[tuple[str, str]] = Counter()
        """By reason and line."""
        self.copied: Counter[str] = Counter()
        """Bytes between host and device: "h2d pinned", "d2h pageable" …"""
        self.flops = 0
        """Of matrix products."""

    def operations(self) -> Counter[str]:
        """Launches by operation."""
        found: Counter[str] = Counter()
        for (operation, _), count in self.launches.items():
            found[operation] += count
        return found

    def described(self) -> str:
        """Launches and syncs with their lines, the most frequent first."""
        lines = [
            f"{count:6d} {what}  {line}"
            for counter in (self.launches, self.syncs)
            for (what, line), count in counter.most_common()
        ]
        return "\n".join(lines)


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, device: object = None, **_: object) -> None:
        gpu = current()
        gpu.streams += 1
        self.device, self.name = device, f"stream {gpu.streams}"

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, other: "Stream") -> None:
        current().clocks.join(self.name, current().clocks.clock(other.name))

    def record_event(self, event: "Event | None" = None) -> "Event":
        made = event or Event()
        made.record(self)
        return made

    def synchronize(self) -> None:
        current().sync("stream.synchronize")
        current().clocks.join(HOST, current().clocks.clock(self.name))

    def query(self) -> bool:
        current().clocks.join(HOST, current().clocks.clock(self.name))
        return True


class Event:
    """Stands in for torch.cuda.Event. The device is done with everything by the time that query() asks."""

    def __init__(self, *_: object, **__: object) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = current().clocks.clock((stream or current().stream).name)

    def wait(self, stream: Stream | None = None) -> None:
        current().clocks.join((stream or current().stream).name, self.clock)

    def query(self) -> bool:
        current().clocks.join(HOST, self.clock)
        return True

    def synchronize(self) -> None:
        current().sync("event.synchronize")
        current().clocks.join(HOST, self.clock)

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


class Graph:
    """Stands in for torch.cuda.CUDAGraph: one launch, which uses what the operations of its capture use."""

    def __init__(self) -> None:
        self.operations = 0
        self._reads: dict[Unit, None] = {}
        self._writes: dict[Unit, None] = {}

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        gpu = current()
        assert gpu.graph is None, "one is being captured"
        assert gpu.stream is not gpu.default, "the default stream cannot be captured"
        gpu.graph = self

    def capture_end(self) -> None:
        assert current().graph is self
        current().graph = None

    def use(self, reads: Iterable[Unit], writes: Iterable[Unit]) -> None:
        """An operation that is captured. Memory of the graphs is left out: no one else has it."""
        self.operations += 1
        made = current().made_in_graphs
        self._reads |= {unit: None for unit in reads if unit[0] not in made}
        self._writes |= {unit: None for unit in writes if unit[0] not in made}

    def replay(self) -> None:
        gpu = current()
        gpu.clocks.join(gpu.stream.name, gpu.clocks.clock(HOST))
        gpu.clocks.use(gpu.stream.name, self._reads, self._writes, line())
        gpu.counts.launches["[graph]", line()] += 1


_running: "list[FakeGpu]" = []


def current() -> "FakeGpu":
    """The one that has been entered."""
    return _running[-1]


class FakeGpu(TorchDispatchMode):
    """Entering it enters FakeTensorMode and puts the stand-ins for torch.cuda in their places. Of one thread: torch's
    modes are."""

    def __init__(self, guard: str, free: int = TOTAL_BYTES) -> None:
        """guard: the library made of guard.cpp. free: bytes that torch.cuda.mem_get_info() says."""
        super().__init__()
        if not torch.version.cuda:
            torch.ops.load_library(guard)
        self.clocks = Clocks()
        self.counts = Counts()
        self.live = self.peak = 0
        """Bytes of the device's memory that tensors have now, and had at most since it was last set."""
        self.streams = 0
        self.graph: Graph | None = None
        """That is captured now."""
        self.made_in_graphs: set[int] = set()
        """Storages that were allocated in a capture, and are held."""
        self._free = free
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._parts: dict[int, int] = {}  # storage → bytes of each of its parts
        self._owners: dict[int, str] = {}  # storage → the stream that its memory belongs to
        self._entered: contextlib.ExitStack | None = None
        self._depth = 0

    @property
    def races(self) -> list[Race]:
        """All that were found."""
        return self.clocks.races

    @contextlib.contextmanager
    def counted(self) -> Iterator[Counts]:
        """What happens within."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    @contextlib.contextmanager
    def as_one(self, name: str, moved: int) -> Iterator[None]:
        """Count what happens within as one launch that moves so many bytes and needs no memory beside its results."""
        peak = self.peak
        with self.counted():
            yield
        self.peak = max(peak, self.live)
        if self.graph is not None:
            return
        self.counts.launches[f"[{name}]", line()] += 1
        self.counts.moved[f"[{name}]"] += moved

    def divide(self, tensor: Tensor, part_bytes: int) -> None:
        """Have uses of the parts of a tensor's memory told apart, such as the pages of a pool."""
        self._parts[_storage(tensor)] = part_bytes

    def sync(self, why: str) -> None:
        """The host waits for the device."""
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
        self.counts.syncs[why, line()] += 1

    def keep(self, tensor: Tensor) -> None:
        """The allocator waits for all uses of a tensor's memory before it is used again."""
        self._owners.pop(_storage(tensor), None)

    def host_reads(self, tensor: Tensor) -> None:
        """The host reads a tensor in its memory; through an array of pinned memory it may write, too."""
        units = self._units(tensor)
        self.clocks.use(HOST, units, units if getattr(tensor, "_pinned", False) else (), line())

    def value(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, if they are known."""
        return getattr(tensor, "_known", None) if isinstance(tensor, FakeTensor) else tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":
            return func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if func.name() not in WHOLE and func.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        pinned = bool(kwargs.pop("pin_memory", False))
        if name == "_pin_memory":
            func, args, pinned = torch.ops.aten.clone.default, args[:1], True
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._remember(func, args, made, self._compute(func, args, kwargs, (*given, *made)))
        view = _is_view(func)
        for leaf in made:
            if any(leaf is each for each in given):
                continue
            leaf._pinned = pinned or (view and any(getattr(each, "_pinned", False) for each in given))
        if name not in FREE and not view:
            if any(leaf.device.type == "cuda" for leaf in (*given, *made)):
                self._launch(func, name, args, kwargs, given, made)
            else:
                self._on_host(given, [*made, *_mutated(func, args)])
        return result

    def _on_host(self, read: list[Any], written: list[Any]) -> None:
        """An operation of the CPU. Pinned memory is what the device reads and writes, too."""
        reads, writes = ([each for each in some if getattr(each, "_pinned", False)] for some in (read, written))
        if reads or writes:
            units = [[unit for each in some for unit in self._units(each)] for some in (reads, writes)]
            self.clocks.use(HOST, *units, line())

    def _launch(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Any], made: list[Any]) -> None:
        stream, where = self.stream.name, line()
        self.clocks.join(stream, self.clocks.clock(HOST))  # what the host launches comes after all that it knows
        if name in COPIES and given and (made or name == "copy_"):
            target, source = (given[0], given[1]) if name == "copy_" and len(given) > 1 else (made[0], given[0])
            if source.device.type != target.device.type:
                self._copy(name, source, target, args, kwargs)
                return
        written = [*made, *_mutated(func, args)]
        if self.graph is not None:  # what its operations touch follows from values that are not known yet
            units = [[unit for each in some for unit in self._units(each)] for some in (given, written)]
            self.graph.use(*units)
            return
        reads = [unit for each in given for unit in self._touched(name, each, given)]
        writes = [unit for each in written for unit in self._touched(name, each, given)]
        self.clocks.use(stream, reads, writes, where)
        self.counts.launches[name, where] += 1
        self.counts.moved[name] += _bytes(name, given, made)
        self.counts.flops += _flops(name, given, made)

    def _copy(self, name: str, source: Any, target: Any, args: Any, kwargs: Any) -> None:
        if self.graph is not None:
            raise RuntimeError("a copy between host and device is not captured")
        where, up = line(), source.device.type == "cpu"
        host = source if up else target
        asynchronous = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        pinned = getattr(host, "_pinned", False)
        way = f"{'h2d' if up else 'd2h'} {'pinned' if pinned else 'pageable'}"
        self.counts.copied[way] += target.nbytes
        self.counts.launches[f"copy {way}", where] += 1
        # What the driver does with pageable memory is done before the call returns.
        reads = self._units(source) if not up or pinned else ()
        self.clocks.use(self.stream.name, reads, self._units(target), where)
        if not (asynchronous and pinned):
            self.sync(f"blocking copy, {way}")
            self.clocks.join(HOST, self.clocks.clock(self.stream.name))

    def _compute(self, func: Any, args: Any, kwargs: Any, tensors: Iterable[Any]) -> Any:
        """The result of an operation on integers and booleans whose values are known; None for any other."""
        if func._overloadpacket.__name__ in NO_VALUES or any(
            each.is_floating_point() or each.numel() > MOST_VALUES for each in tensors
        ):
            return None
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self.value(each) is None for each in leaves):
            return None
        with unset_fake_temporarily():
            on_host = {**kwargs, **({"device": torch.device("cpu")} if kwargs.get("device") is not None else {})}
            return func(*tree_map_only(Tensor, self.value, args), **tree_map_only(Tensor, self.value, on_host))

    def _remember(self, func: Any, args: Any, made: list[Any], known: Any) -> None:
        if known is None:
            for each in _mutated(func, args):
                each._known = None
        for leaf, value in zip(made, tree_leaves(known), strict=False):
            leaf._known = value
        if not _is_view(func) and not func._schema.is_mutable:
            for leaf in made:
                self._own(leaf)

    def _own(self, made: Tensor) -> None:
        """New memory, from the allocator of the stream."""
        storage = _storage(made)
        self.clocks.forget(storage)
        self._parts.pop(storage, None)
        if made.device.type == "cuda":
            self._owners[storage] = owner = self.stream.name
            if self.graph is not None:
                self.made_in_graphs.add(storage)
            size = made.untyped_storage().nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(made.untyped_storage(), self._freed, storage, owner, size)

    def _freed(self, storage: int, owner: str, size: int) -> None:
        self.live -= size
        self.made_in_graphs.discard(storage)
        if self._owners.get(storage) == owner:
            self.clocks.join(owner, self.clocks.clock(HOST))  # it is the host that would use it again
            self.clocks.free(storage, owner)

    def _touched(self, name: str, tensor: Tensor, given: list[Tensor]) -> Iterable[Unit]:
        """What an operation touches of a tensor: by the rows that it names, where it names some."""
        part = self._parts.get(_storage(tensor))
        index = given[1] if name in BY_ROWS and len(given) > 1 else None
        rows = self.value(index) if index is not None and tensor is given[0] else None
        if part is None or rows is None:
            return self._units(tensor)
        with unset_fake_temporarily():
            numbers = np.array(rows.tolist()).reshape(-1)
        starts = (tensor.storage_offset() + numbers * tensor.stride(0)) * tensor.element_size()
        return [(_storage(tensor), int(each)) for each in np.unique(starts // part)]

    def _units(self, tensor: Tensor) -> list[Unit]:
        storage = _storage(tensor)
        part = self._parts.get(storage)
        if part is None:
            return [(storage, 0)]
        size = tensor.element_size()
        first = tensor.storage_offset() * size
        if tensor.dim() and tensor.stride(0) * size >= part:  # the first dimension steps over parts
            starts = first + np.arange(tensor.shape[0]) * tensor.stride(0) * size
            return [(storage, int(each)) for each in np.unique(starts // part)]
        reach = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)) * size
        return [(storage, each) for each in range(first // part, (first + reach) // part + 1)]

    def __enter__(self) -> Self:
        if self._entered is None:
            self._entered = stack = contextlib.ExitStack()
            _running.append(self)
            self.stream = self.default = Stream()
            stack.enter_context(self._fakes)
            for patched in _patches(self):
                stack.enter_context(patched)
        super().__enter__()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._depth -= 1
        if not self._depth and self._entered is not None:
            self._entered.close()
            self._entered = None
            _running.remove(self)


def _patches(gpu: FakeGpu) -> Iterator[Any]:
    """Stand-ins for what fake tensors and a torch without CUDA have not."""
    to_list, to_numpy = Tensor.tolist, Tensor.numpy

    def values(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        if not isinstance(tensor, FakeTensor):
            return read(tensor)
        if tensor.device.type == "cuda":
            gpu.sync("copy to the host")
            gpu.clocks.join(HOST, gpu.clocks.clock(gpu.stream.name))
        gpu.host_reads(tensor)
        known = gpu.value(tensor)
        with unset_fake_temporarily():
            return read(torch.zeros(tuple(tensor.shape), dtype=tensor.dtype) if known is None else known)

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, gpu.stream = gpu.stream, chosen
        try:
            yield
        finally:
            gpu.stream = before

    def synchronize(*_: object) -> None:
        gpu.sync("cuda.synchronize")
        for number in range(1, gpu.streams + 1):
            gpu.clocks.join(HOST, gpu.clocks.clock(f"stream {number}"))

    yield patch.object(FakeTensor, "tolist", lambda tensor: values(tensor, to_list))
    yield patch.object(Tensor, "item", lambda tensor: values(tensor, lambda each: to_list(each.reshape(-1)[0])))
    yield patch.object(Tensor, "numpy", lambda tensor, **_: values(tensor, to_numpy))
    yield patch.object(Tensor, "record_stream", lambda tensor, _: gpu.keep(tensor))
    yield patch.object(torch.cuda, "CUDAGraph", Graph)
    yield patch.object(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    yield patch.object(torch.cuda, "empty_cache", lambda: None)
    yield patch.object(torch.cuda, "Stream", Stream)
    yield patch.object(torch.cuda, "Event", Event)
    yield patch.object(torch.cuda, "stream", stream)
    yield patch.object(torch.cuda, "current_stream", lambda *_: gpu.stream)
    yield patch.object(torch.cuda, "synchronize", synchronize)

    def reset_peak(*_: object) -> None:
        gpu.peak = gpu.live

    yield patch.object(torch.cuda, "memory_allocated", lambda *_: gpu.live)
    yield patch.object(torch.cuda, "memory_reserved", lambda *_: 0)
    yield patch.object(torch.cuda, "max_memory_allocated", lambda *_: gpu.peak)
    yield patch.object(torch.cuda, "reset_peak_memory_stats", reset_peak)
    yield patch.object(torch.cuda, "device_count", lambda: 8)
    yield patch.object(torch.cuda, "get_device_properties", lambda *_: PROPERTIES)
    yield patch.object(torch.cuda, "mem_get_info", lambda *_: (gpu._free, TOTAL_BYTES))


def line() -> str:
    """The innermost line of the project that runs."""
    frame = sys._getframe()
    while frame is not None:
        path = _ours(frame.f_code.co_filename)
        if path:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


@cache
def _ours(filename: str) -> str:
    """The path of a file of the program from the root on; "" for other files."""
    path = Path(filename).resolve()
    return str(path.relative_to(ROOT)) if str(path).startswith(OURS) else ""


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _mutated(func: Any, args: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    return [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]


def _bytes(name: str, given: list[Any], made: list[Any]) -> int:
    """Device memory that an operation reads and writes. Gathers and scatters touch the rows that they name."""
    if name in ("index_select", "embedding", "index", "gather"):
        return int(2 * made[0].nbytes + sum(each.nbytes for each in given[1:]))
    if name == "index_copy_":
        return int(2 * given[2].nbytes + given[1].nbytes)
    if name == "index_add_":
        return int(3 * given[2].nbytes + given[1].nbytes)
    each_once = {id(each): each for each in (*given, *made)}
    return int(sum(each.nbytes for each in each_once.values() if each.device.type == "cuda"))


def _flops(name: str, given: list[Any], made: list[Any]) -> int:
    return int(2 * made[0].numel() * given[-2].shape[-1]) if name in ("mm", "addmm", "bmm") else 0
