"""The peer's thread and a real prefill server that takes encrypted connections only."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.core.config import TransferConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.allow_list import allowed_prefills
from headrace.engine.kv.memory_plan import stage_geometry
from headrace.engine.model.sharding import part_of
from headrace.engine.model.source import load_spec, resolve_source
from headrace.integrations.vllm.settings import read_settings
from headrace.peer.commands import Loaded, LoadFailed, LoadKv, ReleaseLoad, TicketRef
from headrace.peer.records import PeerLimits
from headrace.peer.staging import Staging
from headrace.peer.thread import PeerThread
from headrace.server.config.curve_keys import write_pair
from headrace.transfer.sockets.curve_keys import ServerKeys
from tests.e2e.harness import Server, pages_in_use, serving, wait_until

MODEL = "stub:layers=4,hidden=32"
PROMPT = tuple(range(200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("keys")
    write_pair(made, "prefill")
    write_pair(made, "stranger")
    write_pair(made / "allowed", "vllm")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    curve = ("--curve-key", str(folder / "prefill.key_secret"), "--curve-allowed", str(folder / "allowed"))
    short = ("--no-prefix-cache", "--drain-timeout", "1")  # a prompt may be left that is held
    with serving("--role", "prefill", "--model", MODEL, "--dtype", "float32", *short, *curve) as made:
        yield made


class Client:
    """A peer with these keys, and what became of one load."""

    def __init__(self, server: Server, key: Path | None, server_keys: tuple[str, ...]) -> None:
        about = server.get("/v1/handoff").json()
        self.server, self.control_port = server, about["control_port"]
        self.staging = Staging(stage_geometry(part_of(load_spec(resolve_source(MODEL))), "float32", 1), 256)
        limits = PeerLimits(
            fingerprint=about["fingerprint"],
            rules=allowed_prefills((), ("127.0.0.1",)),
            pages=self.staging.pages,
            connect_timeout_s=2.0,
            server_keys=ServerKeys(server_keys) if server_keys else None,
        )
        transfer = TransferConfig(peer_timeout_s=0.5, curve_key="" if key is None else str(key))
        self.peer = PeerThread(limits, self.staging, name="test", max_model_len=256, transfer=transfer)
        self.peer.start()

    def load(self, ticket: str, *, http: bool = False) -> Loaded | LoadFailed:
        body = {"prompt_token_ids": PROMPT, "ticket": ticket, "handoff": "hold"}
        assert self.server.post("/v1/prefill", body).status_code == 200
        port = self.server.port if http else self.control_port
        place = TicketRef(name=ticket, host="127.0.0.1", port=port, http=http)
        self.peer.submit(LoadKv(id=ticket, ticket=place, start=0, tokens=len(PROMPT)))
        [result] = self.peer.results(wait_s=20)
        assert isinstance(result, Loaded | LoadFailed)
        return result

    def close(self) -> None:
        self.peer.stop()


@pytest.mark.parametrize("http", [False, True], ids=["by its control endpoint", "by its HTTP port"])
def test_kv_comes_encrypted(server: Server, folder: Path, http: bool) -> None:
    keys = (f"127.0.0.1={folder / 'prefill.key'}", f"10.0.0.1={folder / 'stranger.key'}")
    with closing(Client(server, folder / "allowed/vllm.key_secret", keys)) as client:
        loaded = client.load(f"t-{http}", http=http)
        assert isinstance(loaded, Loaded), loaded
        kv = client.staging.data[:, :, :, loaded.at : loaded.at + loaded.count]
        assert kv.any(axis=-1).all(), "every head of every token is there"
        client.peer.submit(ReleaseLoad(id=loaded.id))
        wait_until(lambda: pages_in_use(server) == 0, 10, "pages are back")
        assert not any(count for name, count in server.metrics().items() if "handshakes_refused" in name)


def test_without_its_key_a_server_is_not_connected_to(server: Server, folder: Path) -> None:
    keys = (f"10.0.0.1={folder / 'prefill.key'}",)
    with closing(Client(server, folder / "allowed/vllm.key_secret", keys)) as client:
        failed = client.load("no-key")
        assert isinstance(failed, LoadFailed)
        assert failed.code == "prefill_not_allowed"
        assert "curve_server_keys" in failed.message


@pytest.mark.parametrize("who", ["in the clear", "stranger", "wrong server key"])
def test_who_may_not_connect_hears_which_keys_to_compare(server: Server, folder: Path, who: str) -> None:
    key = None if who == "in the clear" else folder / "stranger.key_secret"
    if who == "wrong server key":
        key = folder / "allowed/vllm.key_secret"
    server_key = folder / ("stranger.key" if who == "wrong server key" else "prefill.key")
    with closing(Client(server, key, () if key is None else (str(server_key),))) as client:
        failed = client.load(who)
        assert isinstance(failed, LoadFailed)
        assert failed.code == "peer_gone"
        assert "curve-server-key" in failed.message
    wait_until(lambda: server.metrics()["headrace_control_sessions"] == 0, 10, "no session is open")


def test_settings_name_key_files_that_are_there(folder: Path) -> None:
    ours, theirs = str(folder / "allowed/vllm.key_secret"), str(folder / "prefill.key")
    settings = read_settings({"curve_key": ours, "curve_server_keys": [theirs]})
    assert settings.transfer().curve_key == ours
    keys = settings.server_keys()
    assert keys is not None
    assert keys.of("tcp://127.0.0.1:8500")
    assert read_settings({}).server_keys() is None
    for wrong, words in (
        ({"curve_key": ours}, "curve_server_keys"),
        ({"curve_server_keys": [theirs]}, "curve_key"),
        ({"curve_key": theirs, "curve_server_keys": [theirs]}, "no secret key"),
        ({"curve_key": ours, "curve_server_keys": [theirs, theirs]}, "curve_server_keys has two files"),
        ({"curve_key": ours, "curve_server_keys": ["nowhere.key"]}, "nowhere.key"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_settings(wrong)
