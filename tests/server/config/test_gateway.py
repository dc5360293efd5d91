"""Configuration of a gateway: what is refused, and with which words, and where values come from."""

import msgspec
import pytest

from headrace.core.config import Config, GatewayConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.decode_address import DecodeAddress, parse_decode
from headrace.server.config import gateway as subject
from headrace.server.config.curve_keys import write_pair
from headrace.server.config.gateway import check_gateway, gateway_of, load_gateway
from headrace.server.config.settings import GATEWAY_SETTINGS

DECODE = "http://127.0.0.1:8000"
PREFILL = "http://127.0.0.1:8001"
GIVEN = {"decode": [DECODE], "prefill": [PREFILL]}


@pytest.fixture(autouse=True)
def nixl_is_installed(monkeypatch):
    """So that these tests say the same with and without it."""
    monkeypatch.setattr(subject, "find_spec", lambda name: object())


def config(**changes):
    return msgspec.structs.replace(GatewayConfig(decode=(DECODE,), prefill=(PREFILL,)), **changes)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (DECODE, DecodeAddress(DECODE, "127.0.0.1", 5600)),
        (f"{DECODE}/", DecodeAddress(DECODE, "127.0.0.1", 5600)),
        (f"{DECODE}=10.0.0.7:5731", DecodeAddress(DECODE, "10.0.0.7", 5731)),
        ("https://Decode-0:8000", DecodeAddress("https://Decode-0:8000", "decode-0", 5600)),
        ("http://[::1]:8000=[::1]:5600", DecodeAddress("http://[::1]:8000", "::1", 5600)),
    ],
)
def test_addresses_of_decode_engines(text, address):
    assert parse_decode(text) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("127.0.0.1:8000", "is no URL of a server; write it like http://127.0.0.1:8001"),
        ("http://127.0.0.1:99999", "its port is not a number from 1 to 65535"),
        ("http://127.0.0.1:8000/v1", "write the server's address only, http://127.0.0.1:8000"),
        (f"{DECODE}=5600", "'5600' is no HOST:PORT of a side channel"),
        (f"{DECODE}=:5600", "':5600' is no HOST:PORT of a side channel"),
        (f"{DECODE}=127.0.0.1:0", "is no HOST:PORT of a side channel"),
        (f"{DECODE}=127.0.0.1:65536", "is no HOST:PORT of a side channel"),
        (f"{DECODE}=127.0.0.1:{'9' * 9000}", "is no HOST:PORT of a side channel"),
    ],
)
def test_wrong_addresses_of_decode_engines(text, words):
    with pytest.raises(ConfigError) as raised:
        parse_decode(text)
    assert words in str(raised.value)
    assert str(raised.value).startswith(f"--decode {text.partition('=')[0]}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode": ()}, "a gateway needs decode engines: add --decode"),
        ({"prefill": ()}, "a gateway needs prefill servers: add --prefill"),
        ({"decode": (DECODE, f"{DECODE}=127.0.0.1:5601")}, f"two of them have the URL {DECODE}"),
        ({"decode": (DECODE, "http://127.0.0.1:8002")}, "two of them have the side channel 127.0.0.1:5600"),
        ({"prefill": (DECODE,)}, f"--prefill and --decode both name {DECODE}"),
        ({"prefill": (PREFILL, PREFILL)}, f"--prefill {PREFILL} is given more than once"),
        ({"prefill": ("ftp://here",)}, "--prefill ftp://here is no URL of a server"),
        ({"lease_s": 30.0, "lease_limit_s": 20.0}, "--lease-limit 20 is shorter than --lease 30"),
        ({"api_keys": ("two words",)}, "an API key has to be ASCII without spaces"),
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 is reachable from other machines and no API key is set"),
        ({"side_channel_host": "0.0.0.0"}, "--side-channel-host 0.0.0.0 is no address that decode engines could"),
        ({"side_channel_host": "10.0.0.7"}, "who reaches it reads the KV of all prompts"),
        ({"side_channel_port": 8100}, "--port and --side-channel-port are both 8100"),
        (
            {"decode_engine": "sglang", "side_channel_port": 8998},
            "--side-channel-port and --bootstrap-port are both 8998",
        ),
        (
            {"decode_engine": "sglang", "decode": (f"{DECODE}=127.0.0.1:5600",)},
            "have no side channel; write their URL alone",
        ),
        (
            {"decode_engine": "sglang", "device": "cuda:1"},
            "--device cuda:1 is for vLLM decode engines; leave it out",
        ),
        ({"decode_engine": "sglang", "remote": "cost"}, "--remote cost is for vLLM"),
        ({"decode_prefill_rate": 900.0}, "--decode-prefill-rate is for comparing costs; add --remote cost"),
        ({"decode_kv_events_port": 5557, "remote": "never"}, "--decode-kv-events-port is for comparing costs"),
        ({"curve_key": "a.key_secret"}, "add --curve-server-key FILE"),
        ({"curve_server_keys": ("a.key",)}, "add --curve-key FILE"),
    ],
)
def test_what_is_refused(changes, words):
    with pytest.raises(ConfigError) as raised:
        check_gateway(config(**changes))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_allowed_when_told_so():
    check_gateway(config(host="0.0.0.0", api_keys=("key",)))
    check_gateway(config(host="0.0.0.0", insecure=True))
    check_gateway(config(remote="cost", decode_prefill_rate=900.0, decode_kv_events_port=5557))
    check_gateway(config(remote="never"))
    check_gateway(config(side_channel_host="10.0.0.7", insecure_decode=True))
    check_gateway(config(decode=(f"{DECODE}=127.0.0.1:5600", "http://127.0.0.1:8002=127.0.0.1:5601")))


def test_curve_keys_do_not_cover_decode_engines(tmp_path):
    public, secret = write_pair(tmp_path, "gateway")
    keys = config(curve_key=str(secret), curve_server_keys=(str(public),))
    with pytest.raises(ConfigError, match=r"know no encryption and no keys. Add --insecure-decode"):
        check_gateway(keys)
    check_gateway(msgspec.structs.replace(keys, insecure_decode=True))
    other = msgspec.structs.replace(keys, curve_server_keys=(f"10.0.0.9={public}",), insecure_decode=True)
    with pytest.raises(ConfigError, match=f"no --curve-server-key is for {PREFILL}"):
        check_gateway(other)


def test_values_come_from_file_environment_and_flags(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text(f'decode = "{DECODE}"\nprefill = ["{PREFILL}/"]\nlease = 5\nport = 8200\napi_key = "file"\n')
    found = load_gateway({"config": str(file), "port": "8300"}, {"HEADRACE_API_KEY": "one,two"})
    assert found == config(lease_s=5.0, port=8300, api_keys=("one", "two"))


def test_wrong_values_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="--lease: expected a number of seconds, at least 1, got '0'"):
        load_gateway({**GIVEN, "lease": "0"}, {})
    with pytest.raises(
        ConfigError, match="--decode-engine: expected one of vllm, sglang, got 'vlm'; did you mean vllm"
    ):
        load_gateway({**GIVEN, "decode-engine": "vlm"}, {})
    file = tmp_path / "gateway.toml"
    file.write_text("leese = 5\n")
    with pytest.raises(ConfigError, match="unknown key 'leese'; did you mean lease"):
        load_gateway({"config": str(file)}, {})


def test_nixl_has_to_be_installed(monkeypatch):
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[nixl,server\]'"):
        load_gateway(GIVEN, {})


def test_a_prefill_server_starts_a_gateway_with_its_own_addresses_and_keys():
    assert gateway_of(Config()) is None
    server = Config().server
    server = msgspec.structs.replace(
        server, role="prefill", host="0.0.0.0", port=8001, gateway_decode=(DECODE,), api_keys=("one", "two")
    )
    gateway = gateway_of(msgspec.structs.replace(Config(), server=server))
    assert gateway is not None
    assert (gateway.decode, gateway.prefill) == ((DECODE,), (PREFILL,))
    assert (gateway.host, gateway.port, gateway.side_channel_host) == ("0.0.0.0", 8100, "127.0.0.1")
    assert (gateway.api_keys, gateway.prefill_api_key) == (("one", "two"), "one")
    wrong = msgspec.structs.replace(server, gateway_decode=("nowhere",))
    with pytest.raises(ConfigError, match="--gateway-decode nowhere is no URL"):
        gateway_of(msgspec.structs.replace(Config(), server=wrong))


def test_every_field_is_a_setting():
    fields = {field.name for field in msgspec.structs.fields(GatewayConfig)}
    assert {setting.field for setting in GATEWAY_SETTINGS} == fields
    assert len({setting.key for setting in GATEWAY_SETTINGS}) == len(GATEWAY_SETTINGS)
