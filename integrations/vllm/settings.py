"""kv_connector_extra_config: what a user may set."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.core.config import TransferConfig
from headrace.core.types.allow_list import Rules, allowed_prefills
from headrace.core.types.errors import ConfigError
from headrace.transfer.sockets.curve_keys import ServerKeys, known_servers

Seconds = Annotated[float, Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """allow_prefill: hosts, HOST:PORT or networks whose control endpoints requests may name; loopback unless set.
    fingerprint: of the model, instead of one made from its files. staging_tokens: KV on its way at a time; 0 is twice
    max_model_len. prefill_api_key: shown to HTTP ports that are asked for a control endpoint. checksum: insist on
    checksums. load_timeout_s: silence about one load. connect_timeout_s: no session with a control endpoint.
    curve_key: file with this vLLM's CURVE keys, "" for connections in the clear. curve_server_keys: files with the
    public keys of prefill servers, FILE for all of them, HOST=FILE or HOST:PORT=FILE as requests name them."""

    allow_prefill: tuple[str, ...] = ("127.0.0.0/8", "::1/128", "localhost")
    fingerprint: str = ""
    staging_tokens: Annotated[int, Meta(ge=0)] = 0
    prefill_api_key: str = ""
    checksum: bool = True
    load_timeout_s: Seconds = 120.0
    connect_timeout_s: Seconds = 10.0
    curve_key: str = ""
    curve_server_keys: tuple[str, ...] = ()

    def rules(self) -> Rules:
        """Raises ConfigError."""
        return allowed_prefills((), self.allow_prefill)

    def server_keys(self) -> ServerKeys | None:
        """None for connections in the clear. Raises ConfigError for key files that are missing or no use alone."""
        return known_servers(self.curve_key, self.curve_server_keys)

    def transfer(self) -> TransferConfig:
        """The part of it that the connections need."""
        return TransferConfig(checksum=self.checksum, curve_key=self.curve_key)


def read_settings(extra: dict[str, Any]) -> Settings:
    """Raises ConfigError, naming the key."""
    try:
        settings = msgspec.convert(extra, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error}; known are {', '.join(Settings.__struct_fields__)}"
        ) from error
    settings.rules()
    settings.server_keys()
    return settings
