"""The probe of a decode engine: what it finds, and what it refuses, with both values."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.engine_http import EngineUnreachable
from headrace.gateway.vllm_nixl import engine_probe
from headrace.gateway.vllm_nixl.compatibility import Factors, compatibility_hash
from headrace.gateway.vllm_nixl.engine_probe import EngineGone, ModelCard, agent_name, model_card, probe
from headrace.gateway.vllm_nixl.releases import RELEASES
from headrace.server.launch.free_port import free_port
from tests.gateway.vllm_nixl.engines import AGENT, LAYERS, MODEL, agent_blob, engine, metadata
from tests.gateway.vllm_nixl.scripted_engine import ScriptedEngine, handshake, scripted_engine


@pytest.fixture(scope="module")
def shared() -> Iterator[ScriptedEngine]:
    with scripted_engine() as made:
        yield made


@pytest.fixture
def scripted(shared: ScriptedEngine) -> ScriptedEngine:
    fresh = {"/version": (200, {"version": "0.32.0"})}
    card = {"id": "smollm2", "root": MODEL, "parent": None, "max_model_len": 4096}
    shared.answers = {**fresh, "/v1/models": (200, {"data": [card]})}
    shared.payload = handshake()
    return shared


def factors_of(version: str, connector: int) -> Factors:
    return Factors(
        vllm_version=version, nixl_connector_version=connector, model=MODEL, dtype="torch.float32", num_kv_heads=3,
        head_size=64, num_hidden_layers=LAYERS, attn_backend_name="CPU_ATTN",
    )  # fmt: skip


def refusal(scripted: ScriptedEngine, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        probe(scripted.url, scripted.side_channel, **options)
    return str(caught.value)


def test_an_engine_is_what_its_answers_say(scripted: ScriptedEngine) -> None:
    cards = scripted.answers["/v1/models"][1]["data"]
    cards += [{"id": "alias", "root": MODEL}, {"id": "adapter", "root": "/lora", "parent": "smollm2"}]
    found = probe(scripted.url, scripted.side_channel, api_key="secret")
    assert found == engine(
        url=scripted.url,
        side_channel=scripted.side_channel,
        served_names=("smollm2", "alias"),
        adapters=("adapter",),
        addresses=("127.0.0.1",),
    )
    assert found.agent == AGENT
    assert scripted.keys[-1] == "Bearer secret"


@pytest.mark.parametrize(("change", "words"), [
    ({"kv_cache_layout": "LBNHC"}, "kv_cache_layout: LBNHC at the decode engine; this gateway serves LBHNC"),
    ({"region_group_ids": (0, 1) * 15}, "KV cache groups: 2 at the decode engine; this gateway serves 1"),
    ({"block_lens": (96,) * 15 + (192,) * 15}, "different block lengths: 2"),
    ({"physical_blocks_per_logical_kv_block": 4}, "kernel blocks in a block: 4"),
    ({"dcp_size": 2}, "decode context parallel size: 2"),
    ({"pcp_size": 2}, "prefill context parallel size: 2"),
    ({"ssm_sizes": (8, 8)}, "sizes of SSM states: (8, 8)"),
    ({"ple_block_len": 8}, "length of PLE states: 8"),
    ({"packed_member_layouts": {"a": (0, 1)}}, "packed layers: 1"),
    ({"region_names": ("model.layers.1.attn", "model.layers.0.attn") * 15}, "order of layers: model.layers.1.attn"),
    ({"region_names": ("x",) * 30}, "order of layers: x"),
    ({"block_lens": (), "kv_caches_base_addr": ()}, "has 0 regions"),
    ({"block_size": 0}, "blocks of 0 tokens"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_caches_of_another_form_are_refused(scripted: ScriptedEngine, change: dict[str, Any], words: str) -> None:
    scripted.payload = handshake(metadata(**change))
    assert words in refusal(scripted)


@pytest.mark.parametrize(("change", "words"), [
    ({"dtype": "torch.bfloat16"}, "whichever its dtype and heads"),
    ({"model": "/other"}, "whichever its dtype and heads"),
    ({"nixl_connector_version": 13}, "version of NixlConnector: 13"),
])  # fmt: skip
def test_a_hash_that_is_not_met_is_refused(scripted: ScriptedEngine, change: dict[str, Any], words: str) -> None:
    factors = factors_of("0.32.0", 14)
    scripted.payload = handshake(digest=compatibility_hash(replace(factors, **change)))
    assert words in refusal(scripted)


CARD = ModelCard(id="smollm2", root=MODEL, max_model_len=4096)


ENDS = (next(iter(RELEASES)), next(reversed(RELEASES)))  # between them in the full run only


@pytest.mark.parametrize(
    ("version", "connector"),
    [pytest.param(*each, marks=() if each[0] in ENDS else pytest.mark.full) for each in RELEASES.items()],
)
def test_an_engine_without_an_api_server_is_known_by_its_hash(
    scripted: ScriptedEngine, version: str, connector: int
) -> None:
    scripted.answers = {}
    scripted.payload = handshake(digest=compatibility_hash(factors_of(version, connector)))
    found = probe(scripted.url, scripted.side_channel, card=CARD)
    assert (found.vllm_version, found.served_names, found.max_model_len) == (version, ("smollm2",), 4096)
    other = refusal(scripted, card=replace(CARD, root="/other"))
    assert f"of vLLM {', '.join(RELEASES)} none fits" in other
    assert "the model '/other'" in other


@pytest.mark.parametrize(("text", "words"), [
    ("smollm2", "is no entry of GET /v1/models in JSON"),
    ('{"id": "m", "root": 3}', r"\$.root"),
    ('{"id": "m", "root": "/m"}', "needs id, root"),
    ('{"id": "m", "root": "/m", "max_model_len": -1}', "needs id, root"),
])  # fmt: skip
def test_model_cards_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--decode-model-card.*{words}"):
        model_card(text)


def test_the_model_card_of_the_flag() -> None:
    assert model_card("") is None
    assert model_card(msgspec.json.encode(CARD).decode()) == CARD


@pytest.mark.parametrize(("version", "connector"), RELEASES.items())
def test_releases_are_told_by_their_connector(scripted: ScriptedEngine, version: str, connector: int) -> None:
    scripted.answers["/version"] = (200, {"version": version})
    scripted.payload = handshake(digest=compatibility_hash(factors_of(version, connector)))
    found = probe(scripted.url, scripted.side_channel)
    assert (found.vllm_version, found.addresses) == (version, ("127.0.0.1",))
    assert found.differs_from(engine()) == ""
    scripted.payload = handshake(digest=compatibility_hash(factors_of(version, 20)))
    assert f"20 at the decode engine; this gateway serves {connector} of vLLM {version}" in refusal(scripted)


def test_a_version_that_was_not_tested_needs_a_flag(scripted: ScriptedEngine) -> None:
    scripted.answers["/version"] = (200, {"version": "0.34.0"})
    assert "vLLM 0.34.0; tested are 0.30.0, 0.31.0, 0.32.0, 0.33.0" in refusal(scripted)
    scripted.payload = handshake(digest=compatibility_hash(factors_of("0.34.0", 15)))
    assert probe(scripted.url, scripted.side_channel, allow_untested=True).vllm_version == "0.34.0"
    scripted.payload = handshake(digest=compatibility_hash(factors_of("0.34.0", 16)))
    text = refusal(scripted, allow_untested=True)
    assert "version of NixlConnector: 16 at the decode engine; this gateway serves 15 of vLLM 0.34.0" in text


@pytest.mark.parametrize(("path", "answer", "words"), [
    ("/v1/models", (401, {}), "GET /v1/models answers 401: it wants another API key"),
    ("/v1/models", (404, {}), "GET /v1/models answers 404: it is no vLLM server"),
    ("/v1/models", (200, b"<html>"), "GET /v1/models sent something that is not vLLM's"),
    ("/v1/models", (200, {"data": []}), "GET /v1/models names no model with a root"),
    ("/version", (200, {"Version": "1"}), "GET /version sent something that is not vLLM's"),
], ids=str)  # fmt: skip
def test_servers_of_another_kind(scripted: ScriptedEngine, path: str, answer: tuple[int, Any], words: str) -> None:
    scripted.answers[path] = answer
    assert words in refusal(scripted)


def test_an_engine_that_is_not_there_yet(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineUnreachable, match="GET /version"):
        probe(f"http://127.0.0.1:{free_port()}", scripted.side_channel)
    scripted.answers["/version"] = (503, {})
    with pytest.raises(EngineUnreachable, match="503"):
        probe(scripted.url, scripted.side_channel)
    scripted.answers["/version"] = (200, {"version": "0.32.0"})
    begin = time.monotonic()
    with pytest.raises(EngineGone, match="nothing listens at its side channel"):
        probe(scripted.url, ("127.0.0.1", free_port()))
    assert time.monotonic() - begin < 2
    scripted.payload = None
    with pytest.raises(EngineUnreachable, match=r"does not answer within 0\.1 s"):
        engine_probe.ask_side_channel(scripted.side_channel, timeout_s=0.1)


def test_a_side_channel_whose_host_has_several_addresses(scripted: ScriptedEngine) -> None:
    """localhost is ::1, too, where nothing listens."""
    assert probe(scripted.url, ("localhost", scripted.side_channel[1])).engine_id


def test_something_else_at_the_side_channel(scripted: ScriptedEngine) -> None:
    def close_each() -> None:
        with contextlib.suppress(OSError):
            while True:
                other.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as other:
        closing = threading.Thread(target=close_each)
        closing.start()
        with pytest.raises(EngineGone, match="no ZMQ socket listens there"):
            probe(scripted.url, other.getsockname())
        other.shutdown(socket.SHUT_RDWR)
        closing.join()


def test_a_name_that_is_not_found_says_nothing_of_the_engine(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that counts as gone loses its leases."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(EngineUnreachable, match="tcp://engine:5600: Temporary failure in name resolution") as raised:
        engine_probe.ask_side_channel(("engine", 5600))
    assert not isinstance(raised.value, EngineGone)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.integers(0, 10_000), st.integers(0, 255))
def test_any_handshake_is_understood_or_refused(scripted: ScriptedEngine, rubbish: bytes, at: int, value: int) -> None:
    for payload in (rubbish, handshake(rubbish), _changed(handshake(), at, value)):
        scripted.payload = payload
        try:
            found = probe(scripted.url, scripted.side_channel)
        except ConfigError:
            continue
        assert found.compatibility_hash == engine().compatibility_hash


def _changed(frame: bytes, at: int, value: int) -> bytes:
    at %= len(frame)
    return frame[:at] + bytes([value]) + frame[at + 1 :]


def test_engines_that_cannot_share_a_gateway_are_told_apart() -> None:
    assert engine().differs_from(engine(engine_id="other", url="http://other")) == ""
    other = engine(url="http://other", geometry=Geometry("float32", 30, 3, 64, 64))
    assert other.differs_from(engine()).startswith("geometry: Geometry(dtype='float32', layers=30")
    named = engine(metadata=metadata(region_names=None))
    assert "region_names: None" in named.differs_from(engine())


def test_names_of_nixl_agents() -> None:
    assert agent_name(agent_blob("d")) == "d"
    for blob in (b"", b"nixlSerDes|Agent", agent_blob("d")[:-1], b"other" + agent_blob("d"), agent_blob("d" * 300)):
        assert agent_name(blob) in ("", "d")


def test_metadata_of_another_connector_version_says_what_is_missing(scripted: ScriptedEngine) -> None:
    fields = msgspec.to_builtins(metadata(), builtin_types=(bytes,))
    del fields["block_strides"]
    scripted.payload = handshake(msgspec.msgpack.encode(fields))
    text = refusal(scripted)
    assert "NixlConnector version 14" in text
    assert "block_strides" in text
