"""Device, dtype and available memory of this machine. Imports torch only to query GPUs, since that takes seconds."""

from pathlib import Path
from typing import Literal, NamedTuple

from headrace.core.config import Dtype, EngineConfig, ModelConfig, Quantize
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.kv_files import KvComputation
from headrace.core.version import headrace_version

ResolvedDtype = Literal["float32", "bfloat16", "float16"]
# Devices of NVIDIA's driver, the same on Tegra and under WSL, and AMD's.
_GPU_DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")))
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


# What our kernels, oneDNN and MKL choose code by.
_INSTRUCTION_SETS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "amx_fp16", "avx_vnni",
    "asimd", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


class Computation(NamedTuple):
    """Where a model is computed, and in which dtypes."""

    device: str
    dtype: ResolvedDtype
    """Of the model's weights and KV."""
    native: bool
    """It is computed in that dtype, and in float32 otherwise."""

    @property
    def compute_dtype(self) -> ResolvedDtype:
        """Of products, sums and hidden states."""
        return self.dtype if self.native else "float32"


def resolve_computation(model: ModelConfig, cpuinfo: str, *, elsewhere: bool = False) -> Computation:
    """What --device, --dtype and --quantize mean on this machine.

    cpuinfo: as in EngineConfig. elsewhere: on another machine, that has the device. Raises ConfigError for a device
    that is not there, and a quantisation that it does not compute in.
    """
    device = resolve_device(model.device, elsewhere=elsewhere)
    dtype = resolve_dtype(model.dtype, device, cpuinfo)
    return Computation(device, dtype, computes_in(dtype, device, model.quantize, cpuinfo))


def resolve_device(device: str, *, elsewhere: bool = False) -> str:
    """The device that --device names; "auto" takes CUDA where a GPU works. elsewhere: one that is named is there.
    Raises ConfigError for one that is not there."""
    if device == "auto":
        return "cuda" if any(driver.exists() for driver in _GPU_DRIVERS) and _gpus() else "cpu"
    if device == "cpu":
        return device
    kind, colon, index = device.partition(":")
    if kind == "cuda" and (index.isdecimal() or not colon):
        count = int(index or 0) + 1 if elsewhere else _gpus()
        if not count:
            raise ConfigError(f"device {device} is not available here; write --device cpu")
        if int(index or 0) >= count:
            raise ConfigError(f"device {device} is not available here; the last one is cuda:{count - 1}")
        return device
    raise ConfigError(f"device {device!r} is not supported; supported are auto, cpu, cuda, cuda:N")


def own_device(device: str, local_rank: int) -> str:
    """The device of one of several processes on this machine, by its local rank (modulo the visible GPUs, since a
    launcher may show each process one only). Raises ConfigError for a device that is not there."""
    resolved = resolve_device(device)
    if resolved != "cuda":
        return resolved
    import torch

    return f"cuda:{local_rank % torch.cuda.device_count()}"


def resolve_dtype(dtype: Dtype, device: str, cpuinfo: str) -> ResolvedDtype:
    """The dtype that --dtype names; "auto" takes bfloat16 where the device multiplies it faster than float32.

    cpuinfo: as in EngineConfig.
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if has_matrix_units("bfloat16", device, cpuinfo) else "float32"


def computes_in(dtype: str, device: str, quantize: Quantize, cpuinfo: str) -> bool:
    """Whether a stage computes in the model's dtype; in float32 otherwise. Raises ConfigError for a quantisation that
    the device does not compute in."""
    if quantize == "int8" and device != "cpu":
        raise ConfigError(f"--quantize int8 is for the CPU, not for {device}; write --device cpu")
    if quantize == "int8" and dtype == "float16":
        return False  # its kernels take rows in float32 and bfloat16
    return has_matrix_units(dtype, device, cpuinfo)


def has_matrix_units(dtype: str, device: str, cpuinfo: str) -> bool:
    """Whether matrices of this dtype are multiplied in hardware, and not slower than in float32."""
    if dtype == "float32" or device != "cpu":
        return True
    flags = cpu_flags(cpuinfo)
    if dtype == "float16":
        return bool(flags & {"amx_fp16", "avx512_fp16"})
    return has_bfloat16_vectors(cpuinfo) or bool(flags & {"amx_bf16", "bf16"})


def computation_of(model: ModelConfig, engine: EngineConfig) -> KvComputation:
    """What the bits of KV that is computed here depend on. The model's device is resolved.

    Of a CPU: its maker, whose libraries choose code by it, the instruction sets that our kernels and oneDNN choose by,
    and the set that torch's own operators use. Raises ConfigError as resolve_computation().
    """
    import torch

    computation = resolve_computation(model, engine.cpuinfo)
    if computation.device == "cpu":
        maker = _cpu_fields(engine.cpuinfo).get("vendor_id", "unknown")
        sets = sorted(cpu_flags(engine.cpuinfo) & set(_INSTRUCTION_SETS))
        device = " ".join(["cpu", maker, *sets, f"torch:{torch.backends.cpu.get_cpu_capability()}"])
    else:
        device = torch.cuda.get_device_name(computation.device)
    return KvComputation(
        device=device,
        dtype=computation.compute_dtype,
        quantize=model.quantize,
        torch=str(torch.__version__),
        headrace=headrace_version(),
    )


def has_float8_units(device: str) -> bool:
    """Whether a GPU multiplies matrices in FP8: from compute capability 8.9 on."""
    import torch

    return torch.cuda.get_device_capability(device) >= (8, 9)


def has_bfloat16_vectors(cpuinfo: str) -> bool:
    """Whether AVX512-BF16 is there and faster than float32.

    Intel's CPUs execute it at half the rate of float32 (measured: 84 GFLOP/s of one core beside 160, Xeon of the fifth
    generation). Their units for bfloat16 are those of AMX, which virtual machines often lack.
    """
    fields = _cpu_fields(cpuinfo)
    return "avx512_bf16" in fields.get("flags", "").split() and fields.get("vendor_id") != "GenuineIntel"


def has_wide_vectors(cpuinfo: str) -> bool:
    """Whether the CPU computes with vectors of 512 bits (AVX-512)."""
    return "avx512f" in cpu_flags(cpuinfo)


def has_int8_vectors(cpuinfo: str) -> bool:
    """Whether the CPU multiplies 8 bits with vectors of 512 bits (AVX512-VNNI)."""
    return {"avx512f", "avx512_vnni"} <= cpu_flags(cpuinfo)


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """What the CPU can do, in Linux's words; empty on other systems. Raises OSError for a file that cannot be read."""
    fields = _cpu_fields(cpuinfo)
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def _cpu_fields(cpuinfo: str) -> dict[str, str]:
    """The fields of the first CPU."""
    path, fields = Path(cpuinfo), {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() in fields:
            break
        fields[name.strip()] = value.strip()
    return fields


def available_memory(device: str) -> int:
    """Bytes that this process may still allocate on the device: free GPU memory, or available memory within the
    container's limit. Raises ConfigError when the system does not report it."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    for line in _MEMINFO.read_text().splitlines() if _MEMINFO.is_file() else ():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _cgroup_room())
    raise ConfigError(f"{_MEMINFO} does not tell the available memory; write --kv-pages")


def _gpus() -> int:
    """How many torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cgroup_room() -> int:
    """Bytes left below the container's memory limit (cgroup v2); a very large number without a limit."""
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if not limit.is_file() or not used.is_file() or limit.read_text().strip() == "max":
        return 1 << 62
    return max(0, int(limit.read_text()) - int(used.read_text()))
