"""Specifications by transformers' modules are made in a child process and kept; both ways give the same."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.core.types.errors import ConfigError
from headrace.engine.library.spec import library_spec
from headrace.engine.library.spec_store import RECORDS
from headrace.engine.model.source import ModelSource
from tests.models.architectures import ARCHITECTURES
from tests.models.zoo import make_model

# A process that has not imported transformers.
PLAN = """
import sys
from headrace.core.config import EngineConfig, ModelConfig
from headrace.engine.load_plan import model_terms
terms = model_terms(ModelConfig(model=sys.argv[1], device="cpu"), EngineConfig(cache_dir=sys.argv[2]))
assert "transformers" not in sys.modules
print(terms.spec.library.architecture, terms.length)
"""


def test_a_record_is_what_the_pass_finds_and_is_kept(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    make_model(ARCHITECTURES["mimo-v2-flash"]).save_pretrained(folder)
    command = [sys.executable, "-c", PLAN, str(folder), str(cache)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["MiMoV2FlashForCausalLM", "512"]
    [record] = (cache / "models").iterdir()
    written = record.stat().st_mtime_ns
    found = RECORDS.load(ModelSource("hf", folder), str(cache))
    assert record.stat().st_mtime_ns == written
    assert msgspec.msgpack.encode(found) == msgspec.msgpack.encode(library_spec(ModelSource("hf", folder)))


@pytest.mark.full
def test_what_a_child_says_of_a_model_is_said_here(tmp_path: Path) -> None:
    make_model(ARCHITECTURES["deepseek-v4"]).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="DeepseekV4ForCausalLM has a cache of its own"):
        RECORDS.load(ModelSource("hf", tmp_path / "model"), "")


@pytest.mark.parametrize("model_type", ["own_model", "smollm3"])
def test_code_of_a_repository_is_not_run(tmp_path: Path, model_type: str) -> None:
    """Neither for a model that transformers does not know, nor for one that it knows."""
    make_model(ARCHITECTURES["smollm3"]).save_pretrained(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    changed = {**config, "model_type": model_type, "auto_map": own}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    if model_type == "own_model":
        with pytest.raises(ConfigError, match="transformers cannot read"):
            library_spec(ModelSource("hf", tmp_path))
    else:
        assert library_spec(ModelSource("hf", tmp_path)).library is not None
    assert not ran.exists()
