"""Triton kernels compiled for GPUs that are not there, and what they take of them."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace.engine.attention import triton_work
from headrace.engine.triton import arithmetic, products

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")
WARP = 32
REGISTERS = 65536  # of a multiprocessor
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # that one block may have


class Launch(NamedTuple):
    """A call of launch()."""

    kernel: Any
    arguments: tuple[object, ...]
    constants: dict[str, Any]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches, which are not made."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        assert grid
        launches.append(Launch(kernel, arguments, constants))

    with (
        patch.object(arithmetic, "launch", record),
        patch.object(products, "launch", record),
        patch.object(triton_work, "launch", record),
    ):
        yield launches


class Taken(NamedTuple):
    """What a kernel takes."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread that are in memory in their place."""
    shared: int
    """Bytes of a block."""
    warps: int
    instructions: Counter[str]

    def fits(self, capability: int) -> bool:
        """Whether a block has room on a multiprocessor, and nothing is spilled."""
        registers = self.registers * self.warps * WARP
        return not self.spilled and registers <= REGISTERS and self.shared <= SHARED_BYTES[capability]


def compiled(launch: Launch, capability: int) -> Taken:
    """Compile a kernel as Triton would for these arguments on such a GPU. capability: 90 for 9.0."""
    names = launch.kernel.arg_names
    options = {name: value for name, value in launch.constants.items() if name in OPTIONS}
    constants = {name: value for name, value in launch.constants.items() if name not in OPTIONS}
    given = dict(zip([name for name in names if name not in constants], launch.arguments, strict=True))
    signature = {name: "constexpr" if name in constants else _type(given[name]) for name in names}
    aligned = [at for at, name in enumerate(names) if name in given and _aligned(given[name])]
    attributes = {(at,): [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(made.asm["cubin"])
        usage, code = (_dump(option, binary) for option in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    operations = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", code, re.MULTILINE))
    return Taken(int(found[1]), int(found[2]), made.metadata.shared, made.metadata.num_warps, operations)


def _dump(option: str, binary: Path) -> str:
    done = subprocess.run([TOOLS / "cuobjdump", option, binary], capture_output=True, text=True, check=True)
    return done.stdout


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _aligned(value: object) -> bool:
    """Whether Triton would say that 16 divides it: memory of torch is aligned."""
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
