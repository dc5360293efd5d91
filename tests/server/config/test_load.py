"""Configuration from flags, files and environment, and the errors for mistakes."""

import argparse
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import Config, GroupConfig, SchedulerConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.named_values import named_values
from headrace.server.config.flags import add_flags
from headrace.server.config.load import load
from headrace.server.config.settings import BY_KEY, SETTINGS
from headrace.server.config.toml_file import to_toml
from headrace.server.config.values import parse_value


def parse(*flags: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return vars(parser.parse_args(flags))


def configure(*flags: str, **environ: str) -> Config:
    return load(parse(*flags), environ)


def write(folder: Path, text: str) -> str:
    path = folder / "x.toml"
    path.write_text(text)
    return str(path)


def test_every_toml_key_is_a_flag_with_the_same_meaning(tmp_path: Path) -> None:
    samples: dict[str, tuple[str, list[str]]] = {}
    for setting in SETTINGS:
        match setting.kind:
            case "switch":
                samples[setting.key] = ("false", [f"--no-{setting.key}"])
            case "integer" | "size" | "number":
                samples[setting.key] = (
                    f"{max(64, int(setting.flag.low or 0))}",
                    [setting.option, f"{max(64, int(setting.flag.low or 0))}"],
                )
            case "choice":
                samples[setting.key] = (f'"{setting.choices[-1]}"', [setting.option, setting.choices[-1]])
            case "choices":
                samples[setting.key] = ('["zmq", "shm"]', [setting.option, "zmq,shm"])
            case "list":
                samples[setting.key] = ('["http://a:1"]', [setting.option, "http://a:1"])
            case "text":
                samples[setting.key] = ('"127.0.0.2"', [setting.option, "127.0.0.2"])
    samples["dp-external"] = ('"1/3@[::1]:9000"', ["--dp-external", "1/3@[::1]:9000"])
    samples["record-tokens"] = ("true", ["--record-tokens"])
    samples["pipeline-depth"] = ("3", ["--pipeline-depth", "3"])
    samples["policy-reserve"] = ("0.5", ["--policy-reserve", "0.5"])
    samples["audit-rate"] = ("0.5", ["--audit-rate", "0.5"])
    samples["kv-memory"] = ("0.5", ["--kv-memory", "0.5"])
    samples["trace-sample-ratio"] = ("0.5", ["--trace-sample-ratio", "0.5"])
    samples["otlp-traces-endpoint"] = ('"http://a:1"', ["--otlp-traces-endpoint", "http://a:1"])
    samples["otlp-header"] = ('["a=k"]', ["--otlp-header", "a=k"])
    samples["trace-attribute"] = ('["a=k", "b=l"]', ["--trace-attribute", "a=k", "--trace-attribute", "b=l"])
    samples["tenant-key"] = ('["a=k"]', ["--tenant-key", "a=k"])
    samples["priority-range"] = ('["0:9"]', ["--priority-range", "0:9"])
    samples["lora"] = ('["a=x", "b=y"]', ["--lora", "a=x", "--lora", "b=y"])
    samples["sibling"] = ('["http://a:1", "http://b:1"]', ["--sibling", "http://a:1", "--sibling", "http://b:1"])
    samples["accept-return"] = ('["a:1", "10.0.0.0/8"]', ["--accept-return", "a:1", "--accept-return", "10.0.0.0/8"])
    samples["allow-prefill"] = ('["a:1", "10.0.0.0/8"]', ["--allow-prefill", "a:1", "--allow-prefill", "10.0.0.0/8"])
    for key, (toml, flags) in samples.items():
        role: list[str] = []
        if key in ("stages", "stage-host", "stage-port"):
            role = ["--dtype", "float32", *(["--stages", "external"] if key != "stages" else [])]
        elif key in ("prefill", "allow-prefill", "prefill-api-key", "fallback"):
            role = ["--role", "decode", *(["--fallback", "local"] if key != "fallback" else [])]
        elif key == "remote":
            role = ["--role", "decode", "--prefill", "http://a:1"]
        elif key == "hedge":
            role = ["--role", "decode", "--prefill", "http://a:1", "--prefill", "http://b:1"]
        elif key == "curve-key":
            role = ["--role", "decode", "--prefill", "http://a:1", "--curve-server-key", "a.key"]
        elif key == "curve-server-key":
            role = ["--role", "decode", "--prefill", "http://a:1", "--curve-key", "b.key_secret"]
        elif key == "curve-allowed":
            role = ["--role", "prefill", "--curve-key", "b.key_secret"]
        elif key in ("exchange", "dp-external"):
            role = ["--expert-parallel"]
        elif key == "dp-sync":
            role = [*SHARED, "0/2@127.0.0.1:9000"]
        elif key in ("overlap-prefill-tokens", "overlap-decode-tokens"):
            role = ["--dp", "2", "--expert-parallel", "--overlap"]
        elif key in ("gateway-decode", "sibling", "accept-return"):
            role = ["--role", "prefill"]
        elif key in ("record-minutes", "record-tokens"):
            role = ["--record", "folder"]
        elif key in ("kv-return", "audit-rate"):
            role = ["--role", "decode", "--prefill", "http://a:1"]
        elif key == "kv-events-replay-port":
            role = ["--kv-events-port", "5557"]
        from_file = configure(*role, "--config", write(tmp_path, f"{key} = {toml}\n"))
        underscored = configure(*role, "--config", write(tmp_path, f"{key.replace('-', '_')} = {toml}\n"))
        assert from_file == underscored == configure(*role, *flags), key


def test_precedence_is_flags_environment_file_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, 'port = 1\nchunk-tokens = 7\napi-key = ["of-file"]\n')
    assert configure("--config", path).server.api_keys == ("of-file",)
    from_env = configure("--config", path, "--port", "2", HEADRACE_API_KEY="one, two")
    assert (from_env.server.api_keys, from_env.server.port) == (("one", "two"), 2)
    assert (from_env.scheduler.chunk_tokens, from_env.scheduler.max_running) == (7, SchedulerConfig().max_running)
    assert configure("--api-key", "x", "--api-key", "y", HEADRACE_API_KEY="one").server.api_keys == ("x", "y")
    decode = configure("--role", "decode", "--fallback", "local", HEADRACE_PREFILL_API_KEY="k")
    assert decode.server.prefill_api_key == "k"


def test_external_stages_with_a_key_from_the_environment() -> None:
    config = configure(*EXTERNAL, "--stage-host", "10.0.0.1", HEADRACE_STAGE_KEY=" sesame ")
    assert config.group == GroupConfig(start="external", host="10.0.0.1", key="sesame")
    assert "sesame" not in to_toml(config)
    assert configure(HEADRACE_STAGE_KEY="sesame").group.start == "local", "a key without --stages external is ignored"
    # External stages bind data ports on other machines, so those cannot collide with ports here.
    configure(*EXTERNAL, "--pp", "3", "--data-port", "8000", "--stage-port", "8001")


def test_the_scheduler_slice_gets_copies_of_shared_fields() -> None:
    config = configure("--page-size", "32", "--kv-pages", "99", "--max-model-len", "640")
    assert (config.scheduler.page_size, config.scheduler.kv_pages, config.scheduler.max_model_len) == (32, 99, 640)
    assert not config.scheduler.kv_events
    assert configure("--kv-events-port", "5557").scheduler.kv_events


OVERLAP = ["--overlap", "--dp", "2", "--expert-parallel"]
EXTERNAL = ["--stages", "external", "--dtype", "float32"]
SHARED = ["--expert-parallel", "--dp-external"]
CURVE = ["--curve-key", "k", "--curve-allowed", "d"]
MISTAKES = [
    (["--page-size", "17"], "--page-size 16 or --page-size 32"),
    (["--page-size", "0"], "at least|from 1"),
    (["--port", "65536"], "from 0 to 65535"),
    (["--port", "http"], "--port: expected a whole number"),
    (["--dtype", "bfloat"], "did you mean bfloat16"),
    (["--window-bytes", "3 tons"], "64MiB"),
    (["--transfer-timeout", "nan"], "number of seconds"),
    (["--host", "0.0.0.0"], "--api-key|--insecure"),
    (["--host", "::"], "--insecure"),
    (["--host", "example"], "--insecure"),
    (["--transfer-host", "10.0.0.1"], "--transfer-host 10.0.0.1"),
    (
        ["--transfer-host", "0.0.0.0", "--api-key", "k"],
        "an API key protects neither the control endpoint nor the data ports",
    ),
    (["--host", "0.0.0.0", "--trusted-network"], "--api-key"),
    (["--kv-events-port", "5557", "--kv-events-host", "::", "--api-key", "k"], "reads the token ids of all prompts"),
    (["--role", "prefill", *CURVE, "--kv-events-port", "5557", "--kv-events-host", "::"], "--kv-events-host ::"),
    (["--role", "decode"], "--prefill http://HOST:PORT"),
    (["--prefill", "http://127.0.0.1:8001"], "--role decode"),
    (["--allow-prefill", "10.0.0.5"], "--role decode"),
    (["--curve-key", "k"], "no peer connects"),
    (["--role", "prefill", "--curve-key", "k"], "--curve-allowed FOLDER"),
    (["--role", "prefill", "--curve-allowed", "d"], "--curve-key FILE"),
    (
        ["--role", "prefill", "--curve-key", "k", "--curve-allowed", "d", "--transfer-backends", "nixl,zmq"],
        "which moves KV unencrypted",
    ),
    (["--role", "prefill", "--curve-key", "k", "--curve-server-key", "p"], "--curve-server-key is for decode"),
    (["--role", "decode", "--prefill", "http://a:1", "--curve-key", "k"], "--curve-server-key FILE"),
    (["--role", "decode", "--prefill", "http://a:1", "--curve-server-key", "p"], "--curve-key FILE"),
    (["--role", "decode", "--prefill", "http://a:1", "--curve-allowed", "d"], "--curve-allowed is for prefill"),
    (["--role", "decode", "--allow-prefill", "10.0.0.5/24"], "10.0.0.0/24"),
    (["--role", "decode", "--allow-prefill", "http://a:1"], "HOST:PORT"),
    (["--role", "prefill", "--lora", "smollm2=x"], "the model itself has this name"),
    (["--role", "prefill", "--lora", "x"], "write NAME=FOLDER"),
    (["--role", "prefill", "--fallback", "local"], "--role decode"),
    (["--role", "prefill", "--remote", "cost"], "--remote is for decode servers; add --role decode"),
    (["--role", "decode", "--allow-prefill", "a:1", "--remote", "cost"], "add --prefill http://HOST:PORT"),
    (["--role", "decode", "--prefill", "http://a:1", "--remote", "often"], "expected one of always, never, cost"),
    (["--role", "decode", "--prefill", "127.0.0.1:8001"], "http://127.0.0.1:8001"),
    (["--role", "decode", "--prefill", "http://a:99999"], "65535"),
    (["--role", "decode", "--prefill", "http://a:1/v1"], "address only"),
    (["--role", "decode", "--prefill", "http://a:1", "--prefill", "http://a:1/"], "more than once"),
    (["--control-port", "8000"], "both 8000"),
    (["--max-model-len", "1"], "2 or more"),
    (["--api-key", "two words"], "without spaces"),
    (["--config", "/nowhere/x.toml"], "cannot read /nowhere/x.toml"),
    (["--policy", "lifo"], "fcfs"),
    (["--policy-reserve", "1.5"], "1"),
    (["--priority-range", "high"], "LOW:HIGH"),
    (["--priority-range", "5:1"], "5 is above 1"),
    (["--tenant-key", "alone"], "NAME=KEY"),
    (["--tenant-key", "a=k", "--tenant-key", "b=k"], "another tenant"),
    (["--model", " "], "a text"),
    (["--otlp-traces-endpoint", "collector:4318"], "write it like http://127.0.0.1:4318"),
    (["--otlp-traces-endpoint", "http://u:p@collector:4318"], "a key with --otlp-header"),
    (["--otlp-traces-endpoint", "http://collector:99999"], "write it like http://127.0.0.1:4318"),
    (["--otlp-header", "sesame"], "^--otlp-header: value 1 is not of the form NAME=VALUE$"),
    (["--otlp-header", "a=b", "--otlp-header", "c=%0a"], "value 2"),
    (["--otlp-header", "a b=sesame"], "^--otlp-header: the name or the value of one of them"),
    (["--trace-attribute", "=x"], "--trace-attribute: value 1"),
    (["--trace-sample-ratio", "2"], "expected a number from 0 to 1, got '2'"),
    (["--stage-host", "10.0.0.1"], "--stages external"),
    (["--stage-port", "8300"], "--stages external"),
    (["--stages", "external"], "--dtype"),
    ([*EXTERNAL, "--stage-host", "10.0.0.1"], "HEADRACE_STAGE_KEY"),
    ([*EXTERNAL, "--stage-port", "8000"], "both 8000"),
    ([*EXTERNAL, "--dp", "2", "--expert-parallel"], "write --exchange allgather or --exchange alltoall"),
    (["--pp", "30", "--dp", "3"], "write --dp 2 or less"),
    (["--dp", "0"], "1"),
    (["--dp", "2", "--data-port", "7000", "--control-port", "7001"], "both 7001"),
    (["--kv-events-replay-port", "5558"], "add --kv-events-port"),
    (["--kv-events-port", "5557", "--kv-events-replay-port", "5557"], "both 5557"),
    (["--kv-events-port", "5557", "--kv-events-host", "0.0.0.0"], "--kv-events-host 0.0.0.0"),
    (["--kv-events-port", "5557", "--no-prefix-cache"], "--no-prefix-cache"),
    (["--host-pages", "5", "--no-prefix-cache"], "--host-pages keeps pages of the prefix cache"),
    (["--disk-path", "kv", "--no-prefix-cache"], "--disk-path keeps pages of the prefix cache"),
    (["--kv-library", "ftp://store/"], "--kv-library ftp://store/ is neither a folder nor a store"),
    (["--disk-path", "kv", "--disk-gib", "0"], "write --disk-gib 1 or more"),
    (["--exchange", "alltoall", "--dp", "2"], "add --expert-parallel, or leave it out"),
    ([*SHARED, "two"], "RANK/SIZE@HOST:PORT, such as 0/2@10.0.0.5:9000"),
    ([*SHARED, "0/2@:9000"], "RANK/SIZE@HOST:PORT"),
    ([*SHARED, "0/2@127.0.0.1:0"], "RANK/SIZE@HOST:PORT"),
    ([*SHARED, "0/1@127.0.0.1:9000"], "leave it out for a single one"),
    ([*SHARED, "2/2@127.0.0.1:9000"], "are 0 to 1"),
    ([*SHARED, "0/2@127.0.0.1:8000"], "both 8000"),
    ([*SHARED, "0/2@10.0.0.5:9000"], "--trusted-network"),
    ([*SHARED, "0/2@127.0.0.1:9000", "--dp", "2"], "a server for each of 4 replicas"),
    ([*SHARED, "0/2@127.0.0.1:9000", "--pp", "2"], "write --pp 1 .* or --dp 2 in place of --dp-external"),
    ([*SHARED, "0/2@127.0.0.1:9000", *EXTERNAL], "write --stages local, or --dp 2"),
    (["--dp-external", "0/2@127.0.0.1:9000"], "add --expert-parallel"),
    (["--dp-sync", "device"], "--dp-sync device is for servers with --dp-external"),
    (["--overlap"], "write --dp 2 or more and --expert-parallel beside it, or leave it out"),
    (["--overlap", "--dp", "2"], "write --dp 2 or more and --expert-parallel beside it, or leave it out"),
    (["--overlap", "--tp", "2", "--expert-parallel"], "write --dp 2 or more and --expert-parallel beside it"),
    (["--overlap-prefill-tokens", "64", "--dp", "2", "--expert-parallel"], "add it, or leave this out"),
    (["--overlap-decode-tokens", "64", "--dp", "2", "--expert-parallel"], "add it, or leave this out"),
    ([*OVERLAP, "--overlap-prefill-tokens", "1"], "2"),
    ([*OVERLAP, "--overlap-decode-tokens", "0"], "2"),
    (
        [*OVERLAP, "--chunk-tokens", "256", "--role", "prefill"],
        "--chunk-tokens 512 or more, or --overlap-prefill-tokens 256 or less",
    ),
]


@pytest.mark.parametrize(
    ("flags", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_mistakes_say_what_to_write_instead(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(*flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv-page = 3", r"x.toml: unknown key 'kv-page'; did you mean kv-pages\?"),
        ("qqq = 3", r"unknown key 'qqq'$"),
        ('port = "many"', "x.toml: port: expected a whole number from 0 to 65535, got 'many'"),
        ("checksum = 1", "true or false"),
        ("model = 7", "a text"),
        ("page-size = true", "whole number"),
        ("prefill = [1]", "list of texts"),
        ("port = = 3", "no valid TOML.*line 1"),
        ("[engine]\npage-size = 3", "unknown key 'engine'"),
    ],
)
def test_mistakes_in_files_name_the_key_and_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure("--config", write(tmp_path, text))


@pytest.mark.parametrize(
    "flags",
    [
        ["--host", "localhost"],
        ["--host", "::1"],
        ["--host", "0.0.0.0", "--insecure"],
        ["--host", "0.0.0.0", "--api-key", "k"],
        ["--host", "0.0.0.0", "--insecure", "--transfer-host", "::", "--kv-events-port", "1", "--kv-events-host", "::"],
        [
            "--host",
            "::1",
            "--trusted-network",
            "--transfer-host",
            "::",
            "--kv-events-port",
            "1",
            "--kv-events-host",
            "::",
        ],
        ["--host", "::1", "--role", "prefill", *CURVE, "--transfer-host", "::"],
    ],
)
def test_binds_that_are_fine(flags: list[str]) -> None:
    assert configure(*flags).server.host == flags[1]


@pytest.mark.parametrize(("given", "value"), [("64MiB", 64 << 20), ("1 gb", 10**9), ("70000", 70000), (70000, 70000)])
def test_sizes(given: object, value: int) -> None:
    assert parse_value(BY_KEY["window-bytes"], given, "here") == value


def test_variables_of_opentelemetry_set_what_flags_set() -> None:
    """As its specification writes them: lists with commas, values percent-encoded."""
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20k, x-team=a",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
        "OTEL_SERVICE_NAME": "pair",
        "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=p,deployment.environment.name=test",
    }
    tracing = configure("--trace-service-name", "mine", **variables).tracing
    assert (tracing.endpoint, tracing.sample_ratio, tracing.service_name) == ("http://c:4318", 0.25, "mine")
    assert named_values(tracing.headers, "") == {"authorization": "Bearer k", "x-team": "a"}
    assert named_values(tracing.attributes, "")["k8s.pod.name"] == "p"
    assert not configure(OTEL_EXPORTER_OTLP_ENDPOINT=" ").tracing.endpoint
    with pytest.raises(ConfigError, match=r"^OTEL_TRACES_SAMPLER_ARG: expected a number from 0 to 1, got 'x'$"):
        configure(OTEL_TRACES_SAMPLER_ARG="x")


def test_without_the_sdk_tracing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--otlp-traces-endpoint", "http://127.0.0.1:4318"]
    configure(*flags)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"^--otlp-traces-endpoint .*: pip install 'headrace\[tracing\]'$"):
        configure(*flags)
    configure()


def test_secrets_are_never_printed() -> None:
    text = to_toml(configure("--api-key", "sesame", "--otlp-header", "x-key=sesame"))
    assert "sesame" not in text
    with pytest.raises(ConfigError) as caught:
        parse_value(BY_KEY["api-key"], 12345, "api-key")
    assert "12345" not in str(caught.value)


@given(
    port=st.integers(0, 65535),
    page=st.sampled_from([1, 2, 16, 64]),
    pages=st.integers(0, 10**6),
    cache=st.booleans(),
    timeout=st.floats(0.001, 1e6),
    model=st.text(alphabet=st.characters(categories=("L", "N", "P", "S", "Z")), min_size=1).filter(
        lambda text: text.strip()
    ),
)
def test_printed_toml_loads_to_the_same_configuration(
    tmp_path_factory: pytest.TempPathFactory,
    port: int,
    page: int,
    pages: int,
    cache: bool,
    timeout: float,
    model: str,
) -> None:
    flags = ["--port", str(port), "--page-size", str(page), "--kv-pages", str(pages), f"--model={model}"]
    flags += ["--prefix-cache" if cache else "--no-prefix-cache", "--transfer-timeout", repr(timeout)]
    config = configure(*flags)
    path = tmp_path_factory.mktemp("toml") / "x.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert configure("--config", str(path)) == config


def test_the_shipped_configurations_load() -> None:
    for path in sorted(Path("configs").glob("*.toml")):
        assert configure("--config", str(path)).server.role == path.stem
