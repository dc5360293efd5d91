"""Every kind of GGUF tensors that the gguf package expands: read whole and in parts, matrices and experts."""

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from headrace.core.types.errors import ConfigError
from headrace.engine.model.gguf_file import GgufFile
from tests.engine.gguf_files import write_gguf

KINDS = GGMLQuantizationType
PLAIN = {KINDS.F32: np.float32, KINDS.F16: np.float16}
# Those that models are published in: each has to be read.
PUBLISHED = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
]  # fmt: skip
OTHERS = [kind.name for kind in KINDS if kind.name not in PUBLISHED]
# Largest error of a value, as a share of the largest value of its row, of kinds that the package can make.
ERROR = {
    "BF16": 0.004, "Q4_0": 0.14, "Q4_1": 0.08, "Q5_0": 0.07, "Q5_1": 0.04, "Q8_0": 0.01, "TQ1_0": 0.6, "TQ2_0": 0.6,
    "MXFP4": 0.3,
}  # fmt: skip
SHAPE = (3, 7, 1024)  # experts, rows, columns: whole blocks of every kind, and no round number of rows


def stored(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes of random values, or of random blocks where the package makes none; some of these have scales that are no
    numbers."""
    generator = np.random.default_rng(kind)
    values = generator.normal(0, 1, shape).astype(np.float32)
    if kind in PLAIN:
        return values.astype(PLAIN[kind]).view(np.uint8)
    if kind.name in ERROR:
        return quantize(values, kind)
    block, size = map(int, GGML_QUANT_SIZES[kind])
    return generator.integers(0, 256, (*shape[:-1], shape[-1] // block * size), np.uint8)


def expected(kind: GGMLQuantizationType, data: np.ndarray) -> np.ndarray:
    return data.view(PLAIN[kind]).astype(np.float32) if kind in PLAIN else dequantize(data, kind)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_kind_is_read_as_the_package_expands_it(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    matrix, experts = stored(kind, SHAPE[1:]), stored(kind, SHAPE)
    [path] = write_gguf(tmp_path / "a.gguf", "llama", {}, {"m": (matrix, kind), "e": (experts, kind)})
    file = GgufFile(path)
    whole = expected(kind, matrix)
    assert file.tensors["m"].shape == SHAPE[1:]
    assert file.tensors["e"].shape == SHAPE
    np.testing.assert_array_equal(file.read("m"), whole)
    np.testing.assert_array_equal(file.read("e"), expected(kind, experts).reshape(SHAPE))
    rows = np.array([5, 0, 6])
    np.testing.assert_array_equal(file.read("m", rows), whole[rows])
    np.testing.assert_array_equal(file.read("e", np.array([2])), expected(kind, experts[[2]]).reshape(1, *SHAPE[1:]))
    for columns in (range(256, 768), range(100, 301)):
        np.testing.assert_array_equal(file.read("m", None, columns), whole[:, columns.start : columns.stop])
        np.testing.assert_array_equal(file.read("m", rows, columns), whole[rows, columns.start : columns.stop])


@pytest.mark.parametrize("name", ERROR)
def test_a_kind_keeps_the_values_up_to_its_rounding(name: str, tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(0, 1, SHAPE[1:]).astype(np.float32)
    [path] = write_gguf(tmp_path / "a.gguf", "llama", {}, {"m": (quantize(values, KINDS[name]), KINDS[name])})
    error = np.abs(GgufFile(path).read("m") - values).max(1) / np.abs(values).max(1)
    assert error.max() < ERROR[name]
    assert error.max() > ERROR[name] / 20  # it is this kind, and no other


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_are_refused_by_name(name: str, tmp_path: Path) -> None:
    _, size = GGML_QUANT_SIZES[KINDS[name]]
    data = np.zeros((4, int(size)), np.uint8)
    [path] = write_gguf(tmp_path / "a.gguf", "llama", {}, {"blk.0.ffn_up.weight": (data, KINDS[name])})
    with pytest.raises(ConfigError, match=f"tensor blk.0.ffn_up.weight is of kind {name}, which cannot be expanded"):
        GgufFile(path)
