"""The command line of `headrace dynamo`, without Dynamo."""

import argparse
import re
import sys

import msgspec
import pytest

from headrace.cli.commands import build_parser, main
from headrace.core.types.errors import ConfigError
from headrace.integrations.dynamo.options import WorkerSettings, add_flags, settings_of
from headrace.integrations.dynamo.server import Description, tokenizer_source

URL = ("--url", "http://127.0.0.1:8000")
PLAIN = Description(
    kind="prefill", model="m", model_path="owner/name", context_length=64, page_size=16, pages=4, replicas=1
)


def settings(*arguments: str, **environ: str) -> WorkerSettings:
    parser = argparse.ArgumentParser()
    add_flags(parser, environ)
    return settings_of(parser.parse_args(arguments))


def test_settings() -> None:
    made = settings("prefill", *URL)
    assert (made.url, made.component, made.discovery_backend, made.event_plane) == (URL[1], "prefill", "etcd", "")
    assert settings("decode", "--url", "http://h:1/").component == "backend"
    assert settings("decode", *URL).url == "http://127.0.0.1:8000"
    given = settings("decode", *URL, DYN_NAMESPACE="n", DYN_DISCOVERY_BACKEND="file", HEADRACE_API_KEY="k")
    assert (given.namespace, given.discovery_backend, given.api_key) == ("n", "file", "k")
    assert settings("decode", *URL, "--namespace", "own", DYN_NAMESPACE="n").namespace == "own"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "the following arguments are required: role, --url"),
        (("prefill",), "required: --url"),
        (("both", *URL), "invalid choice: 'both'"),
        (("prefill", "--url", "127.0.0.1:8000"), "--url is '127.0.0.1:8000'; it has to be like http://HOST:PORT"),
        (("prefill", *URL, "--wait", "soon"), "argument --wait: 'soon' is no number of seconds"),
        (("prefill", *URL, "--block-size", "0"), "argument --block-size: '0' is no whole number from 1 to 65536"),
        (("prefill", *URL, "--namespce", "x"), "unknown argument --namespce; did you mean --namespace?"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dynamo", *arguments]) == 2
    line, rest = capsys.readouterr().err.split("\n", 1)
    assert told in line
    assert not rest


def test_without_dynamo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)
    monkeypatch.delitem(sys.modules, "headrace.integrations.dynamo.worker", raising=False)
    assert main(["dynamo", "prefill", *URL]) == 2
    assert "dynamo is not installed; headrace dynamo needs: pip install 'headrace[dynamo]'" in capsys.readouterr().err


def test_keys_are_not_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, {"HEADRACE_API_KEY": "secret-key"})
    assert "secret-key" not in parser.format_help()
    assert "dynamo" in build_parser().format_help()


@pytest.mark.parametrize(
    ("given", "path", "files", "told"),
    [
        ("", "owner/name", (), None),
        ("owner/other", "stub:layers=4", (), None),
        ("{folder}", "stub:layers=4", ("config.json", "tokenizer.json"), None),
        ("", "{folder}", ("config.json", "tokenizer.json"), None),
        ("{folder}", "stub:layers=4", ("config.json",), "has no tokenizer.json"),
        ("", "smollm2", (), "the server's --model is 'smollm2', no folder of this machine and no hub id"),
        ("", "/models/a.gguf", (), "with --model-path"),
        ("", "models/a.gguf", (), "with --model-path"),
        ("/nowhere", "owner/name", (), "--model-path is '/nowhere'"),
    ],
)
def test_where_the_tokenizer_is(
    given: str, path: str, files: tuple[str, ...], told: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    for name in files:
        (folder / name).touch()
    given, path = (text.format(folder=folder) for text in (given, path))
    description = msgspec.structs.replace(PLAIN, model_path=path)
    if told is None:
        assert tokenizer_source(given, description) == (given or path)
        return
    with pytest.raises(ConfigError, match=re.escape(told)):
        tokenizer_source(given, description)
