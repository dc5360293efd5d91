"""`headrace keys`, and missing or malformed key files."""

import os
import stat
from pathlib import Path

import pytest
import zmq.auth

from headrace.cli.commands import main
from headrace.core.config import Config, ServerConfig, TransferConfig
from headrace.core.types.errors import ConfigError
from headrace.server.config.curve_keys import check_keys, write_pair
from headrace.transfer.sockets.curve_keys import AllowList, ServerKeys, read_pair, read_public


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_pair_is_readable_by_its_owner_only_and_by_pyzmq(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path / "new"), "--name", "decode-0"]) == 0
    public, secret = tmp_path / "new" / "decode-0.key", tmp_path / "new" / "decode-0.key_secret"
    assert str(secret) in capsys.readouterr().out
    assert (mode(public), mode(secret)) == (0o644, 0o600)
    pair = read_pair(secret)
    assert pair.public == read_public(public) == read_public(secret)
    assert pair.secret not in public.read_text()
    assert zmq.auth.load_certificate(secret) == (pair.public.encode(), pair.secret.encode())
    assert zmq.curve_public(pair.secret.encode()) == pair.public.encode()
    assert sorted(path.name for path in public.parent.iterdir()) == [public.name, secret.name]


def test_a_pair_is_overwritten_with_force_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, secret = write_pair(tmp_path, "a")
    before = secret.read_text()
    assert main(["keys", str(tmp_path), "--name", "a"]) == 2
    assert "--force" in capsys.readouterr().err
    (tmp_path / "a.key").unlink()
    with pytest.raises(ConfigError, match=r"a\.key_secret exists already"):
        write_pair(tmp_path, "a")
    assert secret.read_text() == before
    secret.chmod(0o644)
    assert main(["keys", str(tmp_path), "--name", "a", "--force"]) == 0
    assert secret.read_text() != before
    assert mode(secret) == 0o600


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a"])
def test_a_name_stays_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        write_pair(tmp_path, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "cannot read"),
        (lambda path: path.chmod(0o604), "chmod o-r"),
        (lambda path: path.write_text('public-key = "short"\nsecret-key = "short"\n'), "no CURVE key file"),
        (lambda path: path.write_text("rubbish"), "no CURVE key file"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "no text"),
        (lambda path: path.write_text(path.read_text().replace("secret-key", "other")), "no secret key"),
    ],
)
def test_malformed_key_files_are_named(tmp_path: Path, change: object, message: str) -> None:
    _, secret = write_pair(tmp_path, "a")
    config = Config(transfer=TransferConfig(curve_key=str(secret), curve_allowed=str(tmp_path)))
    check_keys(config)
    assert callable(change)
    change(secret)
    with pytest.raises(ConfigError, match=message) as mistake:
        check_keys(config)
    assert str(secret) in str(mistake.value)


def test_every_prefill_server_has_its_own_key_or_the_common_one(tmp_path: Path) -> None:
    files = {name: str(write_pair(tmp_path, name)[0]) for name in ("all", "one", "port")}
    keys = {name: read_public(Path(file)) for name, file in files.items()}
    texts = (f"prefill-1={files['one']}", f"prefill-1:8001={files['port']}")
    found = ServerKeys((*texts, files["all"]))
    assert found.of("http://prefill-1:8000") == keys["one"]
    assert found.of("http://Prefill-1:8001") == keys["port"]
    assert found.of("http://10.0.0.1:8000") == keys["all"]
    assert ServerKeys(texts).of("http://10.0.0.1:8000") == ""
    with pytest.raises(ConfigError, match="two files"):
        ServerKeys((files["all"], files["one"]))
    _, secret = write_pair(tmp_path, "own")
    config = Config(
        transfer=TransferConfig(curve_key=str(secret)),
        server=ServerConfig(role="decode", prefill=("http://prefill-2:80",), curve_server_keys=texts),
    )
    with pytest.raises(ConfigError, match=r"http://prefill-2:80.*HOST=FILE"):
        check_keys(config)


def test_the_folder_of_allowed_keys_is_reread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        AllowList(tmp_path / "nowhere")
    folder = tmp_path / "allowed"
    folder.mkdir()
    allowed = AllowList(folder)
    public, secret = write_pair(tmp_path, "decode-0")
    key = read_public(public)
    assert allowed.name_of(key) is None
    (folder / "secret.key_secret").write_text(secret.read_text())
    assert allowed.name_of(key) is None
    (folder / "renamed.key").write_text(public.read_text())
    assert allowed.name_of(key) == "renamed"
    (folder / "half.key").write_text('curve\n    public-key = "')
    assert allowed.name_of(key) == "renamed"
    with pytest.raises(ConfigError, match=r"half\.key"):
        AllowList(folder)
    (folder / "renamed.key").unlink()
    assert allowed.name_of(key) is None


def test_a_file_that_could_not_be_read_is_read_again_though_it_looks_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "allowed"
    folder.mkdir()
    allowed = AllowList(folder)
    public, _ = write_pair(tmp_path, "decode-0")
    text = public.read_text()
    file = folder / "decode-0.key"
    file.write_text("x" * len(text))
    os.utime(file, ns=(1, 1))
    assert allowed.name_of(read_public(public)) is None
    file.write_text(text)
    os.utime(file, ns=(1, 1))
    assert allowed.name_of(read_public(public)) == "decode-0"
    file.unlink()
    assert allowed.name_of(read_public(public)) is None
