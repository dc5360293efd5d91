"""The headrace command: mistakes are one line and status 2; help; check."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from headrace.cli import commands as cli
from headrace.core.config import Config
from headrace.core.runtime.process import CONFIGURATION_MISTAKE, MISTAKE
from headrace.server.config.load import CPUINFO_VARIABLE, load
from tests.cpus import KINDS, cpuinfo
from tests.engine.model.test_tokenizer_store import byte_level
from tests.engine.models import CONFIGS, save_model

MISTAKES = [
    ([], "COMMAND"),
    (["sevre"], "serve"),
    (["serve", "a/model"], "unknown argument a/model; did you mean --model a/model?"),
    (["serve", "--kv-page", "3"], "unknown argument --kv-page; did you mean --kv-pages?"),
    (["check", "--prot=3"], "did you mean --port?"),
    (["serve", "--port"], "--port"),
    (["serve", "--role", "decode"], "--prefill"),
    (["serve", "--page-size", "3"], "--page-size 2 or --page-size 4"),
    (["check", "--model", "/nowhere"], "/nowhere"),
    (["check", "--max-model-len", "999999"], "999999"),
    (["check", "--max-model-len", "64", "--kv-pages", "2"], "--kv-pages"),
    (["check", "--device", "abacus"], "abacus"),
    (["check", "--tp", "4"], "write --tp 3 or 9"),
    (["check", "--tp", "2", "--data-port", "65535"], "write 65534 or less"),
    (["check", "--tp", "2", "--port", "7001", "--data-port", "7000"], "--data-port and --port are both 7001"),
    (["check", "--tp", "2", "--pp", "2", "--pp-layers", "8,8,7,7"], "is for 4 stages and --pp is 2"),
    (["check", "--dp", "2", "--expert-parallel"], "this model is dense; leave it out"),
    (["demo", "--modell", "x"], "did you mean --model?"),
    (["bench", "nothing"], "benchmarks/nothing.py"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value) or "nothing")
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace: ")
    assert err.count("\n") == 1
    assert message in err


def test_check_prints_a_loadable_configuration_and_the_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--dtype", "float32", "--device", "cpu", "--max-model-len", "512", "--threads", "1", "--kv-pages", "64"]
    flags += ["--host-pages", "64"]
    assert cli.main(["check", *flags]) == 0
    out = capsys.readouterr().out
    assert "# memory: weights" in out
    assert "64 pages" in out
    assert "45.0 MiB = 64 pages, taken when first used" in out
    path = tmp_path / "x.toml"
    path.write_text(out)
    config = load({"config": str(path)}, {})
    assert (config.model.dtype, config.engine.kv_pages, config.scheduler.max_model_len) == ("float32", 64, 512)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A small model with a tokenizer."""
    byte_level().save_pretrained(tmp_path)
    return save_model(CONFIGS["llama"], tmp_path).folder


def test_check_opens_what_serve_opens(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "--model", str(model_folder), "--device", "cpu", "--dtype", "float32"]
    assert cli.main(command) == 0, capsys.readouterr().err
    weights = model_folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert cli.main(command) == 2
    assert f"{weights} cannot be read as safetensors" in capsys.readouterr().err
    weights.write_bytes(whole)
    for path in model_folder.glob("tokenizer*"):
        path.unlink()
    assert cli.main(command) == 2
    assert "tokenizer" in capsys.readouterr().err
    assert cli.main([*command[:2], str(model_folder / "config.json")]) == 2
    assert "config.json is a file; name the folder" in capsys.readouterr().err


def test_check_prints_what_each_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Uneven heads, copies of KV heads, and ports; all ranks have the same pages."""
    assert cli.main(["check", "--device", "cpu", "--tp", "2", "--kv-pages", "512", "--data-port", "7000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "# rank 1 (stage 0, replica 0, shard 1): layers 0 to 29, query heads 3 to 8, KV heads 1 to 2, "
        "MLP columns 768 to 1535, vocabulary rows 24576 to 49151, data port 7001"
    ) in lines
    memory = [line for line in lines if line.startswith("# memory of rank ")]
    assert len(memory) == 2
    assert all("512 pages" in line for line in memory)
    assert "threads = 1" in lines or len(os.sched_getaffinity(0)) > 3
    stub = "stub:layers=2,hidden=64,heads=8,kv_heads=2"
    assert cli.main(["check", "--device", "cpu", "--pp", "2", "--tp", "4", "--model", stub]) == 0
    out = capsys.readouterr().out
    assert "# rank 5 (stage 1, replica 0, shard 1): layer 1, query heads 2 to 3, KV head 0 (a copy), " in out
    assert cli.main(["check", "--device", "cpu", "--pp", "2", "--model", stub]) == 0
    assert "# stage 1: layer 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "dtype"), KINDS.items())
def test_check_on_another_kind_of_cpu(
    kind: str, dtype: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What "auto" is there, and that this CPU is not asked."""
    monkeypatch.setenv(CPUINFO_VARIABLE, cpuinfo(kind))
    assert cli.main(["check", "--device", "cpu", "--dtype", "auto"]) == 0
    out = capsys.readouterr().out
    assert f'dtype = "{dtype}"' in out
    assert f"# {CPUINFO_VARIABLE}: this CPU is taken for the one of {cpuinfo(kind)}" in out
    assert cli.main(["check", "--device", "cpu", "--dtype", "bfloat16"]) == 0
    assert f"MiB ({dtype}); KV" in capsys.readouterr().out, "in which 16-bit weights are held"


STAGE = ["stage", "--scheduler", "tcp://127.0.0.1:1", "--rank", "0", "--world-size", "1"]


@pytest.mark.parametrize("content", [None, "processor : 0\n"])
@pytest.mark.parametrize("command", [["check"], STAGE], ids=lambda command: command[0])
def test_a_file_without_the_flags_of_a_cpu_is_a_mistake(
    command: list[str],
    content: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "cpuinfo"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(CPUINFO_VARIABLE, str(path))
    assert cli.main(command) == (CONFIGURATION_MISTAKE if command[0] == "stage" else MISTAKE)
    assert f"{CPUINFO_VARIABLE}: expected a file like /proc/cpuinfo" in capsys.readouterr().err


@pytest.mark.cpu_kind
def test_serve_runs_with_a_resolved_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Config] = []

    def serve(config: Config, memory: Sequence[str]) -> int:
        started.append(config)
        assert "2048 pages" in memory[0]
        return 7

    launch = ModuleType("headrace.server.launch.serve")
    launch.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headrace.server.launch.serve", launch)
    assert cli.main(["serve", "--kv-pages", "2048"]) == 7
    (config,) = started
    assert config.model.dtype != "auto"
    assert config.model.device != "auto"
    assert config.model.max_model_len == config.scheduler.max_model_len > 0
    assert (config.scheduler.kv_pages, config.scheduler.vocab_size) == (2048, 49152)
    assert config.engine.threads >= 1


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"], ["bench", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert "headrace" in capsys.readouterr().out


def test_bench_runs_a_module_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "transfer", "--help"])
    assert ended.value.code == 0


def test_a_closed_pipe_is_no_traceback() -> None:
    """`headrace check | head -1`."""
    command = [
        sys.executable,
        "-m",
        "headrace.cli.commands",
        "check",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--kv-pages",
        "512",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
