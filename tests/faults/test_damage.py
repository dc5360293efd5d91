"""Damaged files: weights, pages of the disk tier, the cache folder. They are refused, or not used, or named."""

import random
import shutil
import struct
from pathlib import Path

import pytest
from gguf import GGUFWriter

from headrace.core.types.errors import ConfigError
from headrace.engine.model.checkpoint import open_checkpoint
from headrace.engine.model.fingerprint import fingerprint
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.model.tokenizer_store import load_record
from tests.e2e.harness import serving
from tests.e2e.models import NAME, stub
from tests.engine.models import CONFIGS, make_runner, save_model

COPIES = 60
PROMPTS = 4
LENGTH = 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = save_model(CONFIGS["llama"], tmp_path_factory.mktemp("model")).folder
    return made


def copies(folder: Path, target: Path, seed: int) -> Path:
    """A copy of a model's folder whose file of weights is damaged: a bit of its header, or its end."""
    shutil.copytree(folder, target)
    draw = random.Random(seed)
    path = target / "model.safetensors"
    stored = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(stored[:8], "little")
    if seed % 4 == 0:
        stored = stored[: draw.randrange(len(stored))]
    else:
        stored[draw.randrange(header)] ^= 1 << draw.randrange(8)
    path.write_bytes(stored)
    return target


def test_damaged_headers_are_refused(folder: Path, tmp_path: Path) -> None:
    """In a line that names what is wrong; a few copies are as good as they were, such as those with other metadata."""
    whole = make_runner(folder).fingerprint
    refused = 0
    for seed in range(COPIES):
        try:
            loaded = make_runner(copies(folder, tmp_path / str(seed), seed)).fingerprint
        except ConfigError as error:
            refused += bool(str(error).strip())
        else:
            assert loaded == whole or seed % 4, "nothing that is cut off is loaded"
    assert refused > COPIES / 2


def test_damaged_gguf_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = path.read_bytes()
    for length in range(len(stored)):
        path.write_bytes(stored[:length])
        with pytest.raises(ConfigError):
            load_spec(resolve_source(str(path)))


def gguf(values: bytes = b"", keys: int = 0, tensors: int = 0) -> bytes:
    """A GGUF file of version 3 with these entries after its counts."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + values


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        (gguf(string(b"general.alignment") + struct.pack("<II", 4, 0), 1), "general.alignment"),
        (gguf(string(b"general.alignment") + struct.pack("<I", 8) + string(b"x"), 1), "general.alignment"),
        (gguf(string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, 1), "arrays"),
        (gguf(string(b"t") + struct.pack("<IIQ", 0, 0, 0), tensors=1), "0 dimensions"),
        (gguf(string(b"t") + struct.pack("<I", 1 << 31), tensors=1), "dimensions"),
        (gguf(string(b"k") + struct.pack("<IIQ", 9, 4, (1 << 64) - 1), 1), "model.gguf"),
        (gguf(struct.pack("<Q", (1 << 64) - 1), 1), "model.gguf"),
    ],
)
def test_malformed_gguf_headers_are_refused(stored: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(stored)
    with pytest.raises(ConfigError, match=named) as raised:
        load_spec(resolve_source(str(path)))
    assert "\n" not in str(raised.value)


def test_a_deeply_nested_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_spec(resolve_source(str(tmp_path)))


def test_a_changed_weight_is_another_model(folder: Path, tmp_path: Path) -> None:
    """Where the fingerprint looks. A prefill server with such weights hands nothing over to one that has the others."""
    source = resolve_source(str(folder))
    whole = fingerprint(load_spec(source), open_checkpoint(source, load_spec(source)))
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    path = changed / "model.safetensors"
    stored = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(stored[:8], "little")
    found = 0
    for place in range(header + 3, len(stored), 4 * 1009):  # exponents of float32 weights all over the file
        stored[place] ^= 0x40
        path.write_bytes(stored)
        source = resolve_source(str(changed))
        found += fingerprint(load_spec(source), open_checkpoint(source, load_spec(source))) != whole
        stored[place] ^= 0x40
    assert found > 0


@pytest.mark.faults
def test_damaged_pages_of_the_disk_tier_are_not_used(tmp_path: Path) -> None:
    """Damaged between two lives and while the server runs: texts are right, and what is damaged is counted."""
    model = stub(us_per_token=20)
    flags = ("--role", "colocated", *model.flags, "--kv-pages", "80", "--max-model-len", "1024", "--threads", "1")
    disk = ("--disk-path", str(tmp_path / "kv"), "--disk-gib", "1", "--disk-admission-turn", "0")
    prompts = [model.story()[number * LENGTH : (number + 1) * LENGTH] for number in range(PROMPTS)]

    def check(server: object) -> None:
        for prompt in (*prompts, *prompts):
            body = {"model": NAME, "prompt": list(prompt), "max_tokens": 4, "temperature": 0}
            answer = server.post("/v1/completions", body)  # type: ignore[attr-defined]
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == model.greedy_text(prompt, 4)

    with serving(*flags, *disk) as server:
        check(server)
        assert server.total("headrace_kv_tier_hit_tokens_total") > 0
    damage(tmp_path / "kv", 1)
    with serving(*flags, *disk) as server:
        check(server)
        damage(tmp_path / "kv", 2)
        check(server)
        assert server.metrics()['headrace_kv_tier_pages_total{result="load_failed",tier="disk"}'] > 0
        assert (
            server.metrics()['headrace_requests_total{outcome="finished",reason="length",route="/v1/completions"}']
            == 4 * PROMPTS
        )


def damage(folder: Path, seed: int) -> None:
    """A bit in each page or so of every segment."""
    draw = random.Random(seed)
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 16]
    assert files
    for path in files:
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size - (1 << 15), 1 << 16):
                file.seek(start + draw.randrange(1 << 15))
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 1 << draw.randrange(8)]))


@pytest.mark.faults
def test_a_damaged_tokenizer_in_the_cache_folder(tmp_path: Path) -> None:
    """It is converted again."""
    source, cache = resolve_source("smollm2"), str(tmp_path)
    whole = load_record(source, cache)
    (path,) = tmp_path.rglob("*.msgpack")
    stored = bytearray(path.read_bytes())
    stored[len(stored) // 2] ^= 4
    path.write_bytes(stored)
    assert load_record(source, cache) == whole
    assert path.read_bytes() != stored
