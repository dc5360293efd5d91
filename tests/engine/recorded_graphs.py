"""Stand-ins for torch.cuda's graphs, on the CPU: what is captured is computed again, in the same memory.

    with recorded_graphs() as device:
        ...                       code that captures and replays

As on a GPU, a graph knows addresses, not tensors. What was alive before it was captured has to be alive when it is
replayed. What was allocated in a capture is memory of the graphs: another may use it as soon as it is freed, so that
before every replay all of it is overwritten that no tensor held when that graph was captured.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Memory:
    """One storage that a graph reads or writes."""

    def __init__(self, storage: torch.UntypedStorage, made_by: int | None) -> None:
        """made_by: the number of the graph in whose capture it was allocated."""
        self.made_by, self.freed_by = made_by, None
        # What a capture makes is computed apart: it is the capture's own tensors that are freed.
        self.apart = None if made_by is None else torch.UntypedStorage(storage.nbytes())
        self._outside = weakref.ref(storage)

    freed_by: int | None
    """The last graph in whose capture it was held."""

    @property
    def storage(self) -> torch.UntypedStorage:
        """Where its bytes are."""
        if self.apart is not None:
            return self.apart
        found = self._outside()
        assert found is not None, "a graph uses memory that has been freed"
        return found

    def held_in(self, graph: int) -> bool:
        """Whether it is no other's while this graph is replayed."""
        if self.made_by is None:
            return True
        return self.made_by <= graph and (self.freed_by is None or graph <= self.freed_by)


class At:
    """A tensor by its address."""

    def __init__(self, memory: Memory, tensor: Tensor) -> None:
        self.memory, self._dtype = memory, tensor.dtype
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """One of its own, of the same memory."""
        return torch.empty(0, dtype=self._dtype).set_(self.memory.storage, *self._place)  # type: ignore[call-overload]


class Device:
    """The graphs that were captured, and their memory."""

    def __init__(self) -> None:
        self.captured: list[Graph] = []
        self.open: Graph | None = None
        self.replays = 0
        self._memories: dict[int, Memory] = {}  # by storage
        self._pool: list[Memory] = []

    def at(self, tensor: Tensor, *, made: bool = False) -> At:
        """Where a tensor is. made: by the graph that is captured."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            memory = self._memories[key] = Memory(storage, self.number if made else None)
            if made:
                self._pool.append(memory)
            weakref.finalize(storage, self._free, key, memory)
        return At(self._memories[key], tensor)

    @property
    def number(self) -> int:
        """Of the graph that was begun last."""
        return len(self.captured) - 1

    def _free(self, key: int, memory: Memory) -> None:
        memory.freed_by = self.number
        self._memories.pop(key, None)

    def overwrite(self, graph: int) -> None:
        """What others may have put into memory that is not held in this graph."""
        for memory in self._pool:
            if not memory.held_in(graph):
                torch.empty(0, dtype=torch.uint8).set_(memory.storage).fill_(0xFF)  # type: ignore[call-overload]


class Graph(TorchDispatchMode):
    """Stands in for torch.cuda.CUDAGraph."""

    device: Device

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        """What was captured is not permitted."""
        self._run: list[Callable[[], None]] = []

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert pool == "the pool"
        assert capture_error_mode == "thread_local", "other threads copy pages meanwhile"
        assert self.device.open is None
        self.device.open = self
        self.device.captured.append(self)
        self._number = self.device.number
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        self.device.open = None
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        assert self.device.open is None
        self.device.overwrite(self._number)
        self.device.replays += 1
        for run in self._run:
            run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        owned = {leaf.untyped_storage()._cdata for leaf in given}
        places = tree_map_only(Tensor, self.device.at, (args, kwargs))
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        results = [self.device.at(leaf, made=leaf.untyped_storage()._cdata not in owned) for leaf in made]

        def run() -> None:
            again, named = tree_map_only(At, At.tensor, places)
            new = [leaf for leaf in tree_leaves(func(*again, **named)) if isinstance(leaf, Tensor)]
            for place, value in zip(results, new, strict=True):
                if place.memory.apart is not None and value.data_ptr() != place.tensor().data_ptr():
                    place.tensor().copy_(value)

        self._run.append(run)
        return result

    def call(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Capture a call that writes to tensors beside torch's operations, as kernels of Triton's interpreter do."""
        places = tree_map_only(Tensor, self.device.at, (args, kwargs))

        def run() -> None:
            again, named = tree_map_only(At, At.tensor, places)
            function(*again, **named)

        self._run.append(run)


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, _: "Stream") -> None: ...


@contextmanager
def recorded_graphs() -> Iterator[Device]:
    """Have torch.cuda's graphs be these."""
    device = Device()
    bound = type("BoundGraph", (Graph,), {"device": device})
    with (
        patch.object(torch.cuda, "CUDAGraph", bound),
        patch.object(torch.cuda, "graph_pool_handle", lambda: "the pool"),
        patch.object(torch.cuda, "Stream", Stream),
        patch.object(torch.cuda, "stream", lambda _: nullcontext()),
        patch.object(torch.cuda, "current_stream", lambda *_: Stream()),
        patch.object(torch.cuda, "empty_cache", lambda: None),
    ):
        yield device
