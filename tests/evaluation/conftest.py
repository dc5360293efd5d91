"""A pair with a real model, its tokenizer in a folder, and transformers with the same weights."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.harness import Server, pair
from tests.engine.models import transformers_tokenizer

FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--kv-pages", "256", "--chunk-tokens", "64", "--threads", "1",
         "--served-model-name", "tested")  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> None:
    """lm-eval and datasets fetch nothing, and keep their files out of the home folder. They read this when imported,
    which the tests do after it."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.fixture(scope="session")
def servers() -> Iterator[tuple[Server, Server]]:
    torch.set_num_threads(1)  # transformers computes beside the servers
    with pair(FLAGS, FLAGS) as (prefill, decode):
        yield prefill, decode


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of the model, as a harness wants it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers_tokenizer("smollm2").save_pretrained(folder)
    return folder
