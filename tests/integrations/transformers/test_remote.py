"""generate() goes on from KV that a real prefill server has computed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.core.types.errors import ConfigError, HeadraceError
from headrace.integrations.transformers import RemotePrefill
from headrace.server.config.curve_keys import write_pair
from headrace.server.launch.free_port import free_port
from tests.e2e import gold
from tests.e2e.harness import Server, pages_in_use, serving, wait_until

FLAGS = ("--role", "prefill", "--dtype", "float32", "--max-model-len", "1024", "--no-prefix-cache")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Two would spin for each other while the servers use the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def remote(server: Server) -> Iterator[RemotePrefill]:
    with RemotePrefill(server.url, gold.model()) as made:
        yield made


def prompt(length: int, at: int = 0) -> torch.Tensor:
    return torch.tensor([gold.story_ids()[at : at + length]])


def go_on(input_ids: torch.Tensor, cache: object) -> tuple[int, ...]:
    out = gold.model().generate(
        input_ids, past_key_values=cache, attention_mask=torch.ones_like(input_ids), max_new_tokens=8,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return tuple(out[0, input_ids.shape[1] :].tolist())


@pytest.mark.parametrize("length", [1, 64, 65])
def test_generate_says_what_it_says_alone(server: Server, remote: RemotePrefill, length: int) -> None:
    input_ids = prompt(length)
    cache = remote.prefill(input_ids)
    assert cache.get_seq_length() == length - 1
    assert go_on(input_ids, cache) == gold.greedy(tuple(input_ids[0].tolist()), 8)
    wait_until(lambda: pages_in_use(server) == 0, 10, "pages are back")


def test_the_cache_is_what_is_used(remote: RemotePrefill) -> None:
    input_ids = prompt(100)
    assert go_on(input_ids, remote.prefill(prompt(100, at=1000))) != gold.greedy(tuple(input_ids[0].tolist()), 8)


def test_a_ticket_of_another_prompt_is_refused(server: Server, remote: RemotePrefill) -> None:
    body = {"prompt_token_ids": prompt(100, at=500)[0].tolist(), "ticket": "other", "handoff": "hold"}
    assert server.post("/v1/prefill", body).status_code == 200
    with pytest.raises(HeadraceError, match="prompt"):
        remote.fetch("other", prompt(100))
    wait_until(lambda: pages_in_use(server) == 0, 10, "pages are back")


def test_two_prompts_at_once_are_not_one(remote: RemotePrefill) -> None:
    with pytest.raises(HeadraceError, match=r"\[2, 3\]"):
        remote.prefill(torch.zeros(2, 3, dtype=torch.long))


def test_a_server_that_is_not_there_is_an_error_of_ours() -> None:
    remote = RemotePrefill(f"http://127.0.0.1:{free_port()}", gold.model())
    with remote, pytest.raises(HeadraceError, match="ConnectError") as raised:
        remote.prefill(prompt(3))
    assert raised.value.info.status == 502


@pytest.mark.full
def test_kv_comes_encrypted_where_the_server_takes_nothing_else(tmp_path: Path) -> None:
    public, secret = write_pair(tmp_path, "prefill")
    _, ours = write_pair(tmp_path / "allowed", "notebook")
    curve = ("--curve-key", str(secret), "--curve-allowed", str(tmp_path / "allowed"))
    input_ids = prompt(65)
    with serving(*FLAGS, *curve) as server:
        with RemotePrefill(server.url, gold.model(), curve_key=str(ours), curve_server_keys=[str(public)]) as remote:
            cache = remote.prefill(input_ids)
        assert go_on(input_ids, cache) == gold.greedy(tuple(input_ids[0].tolist()), 8)
        wait_until(lambda: pages_in_use(server) == 0, 10, "pages are back")
        assert not any(count for name, count in server.metrics().items() if "handshakes_refused" in name)


def test_one_key_without_the_other_is_refused(tmp_path: Path) -> None:
    public, secret = (str(path) for path in write_pair(tmp_path, "one"))
    for keys in ({"curve_key": secret}, {"curve_server_keys": [public]}):
        with pytest.raises(ConfigError, match="go together"):
            RemotePrefill("http://127.0.0.1:1", None, **keys)
