"""Settings of the connector: kv_connector_extra_config."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.core.config import TransferConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.allow_list import Rules, allowed_prefills
from headrace.transfer.sockets.curve_keys import ServerKeys, known_servers

Seconds = Annotated[float, Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of kv_connector_extra_config; unknown keys are errors."""

    allow_prefill: tuple[str, ...] = ("127.0.0.0/8", "::1/128", "localhost")
    """Prefill servers that requests may name: hosts, HOST:PORT or networks. Default: loopback."""
    fingerprint: str = ""
    """Fingerprint of the model; "" computes it from the model's files."""
    staging_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens of KV in transfer at a time; 0 takes twice max_model_len."""
    prefill_api_key: str = ""
    """Sent to the prefill servers that allow_prefill names as HOST:PORT when they are asked for their control port."""
    checksum: bool = True
    """Require checksums."""
    load_timeout_s: Seconds = 120.0
    """A load fails after this long without data."""
    connect_timeout_s: Seconds = 10.0
    """A load fails after this long without a session with its prefill server."""
    curve_key: str = ""
    """File with this vLLM's CURVE keys; "" connects in the clear."""
    curve_server_keys: tuple[str, ...] = ()
    """Files with public keys of prefill servers: FILE for all, HOST=FILE or HOST:PORT=FILE as requests name them."""

    def rules(self) -> Rules:
        """The parsed allow list. Raises ConfigError."""
        return allowed_prefills((), self.allow_prefill)

    def server_keys(self) -> ServerKeys | None:
        """Public keys by prefill server; None for connections in the clear. Raises ConfigError for missing key files,
        or curve_server_keys without curve_key or the reverse."""
        return known_servers(self.curve_key, self.curve_server_keys)

    def transfer(self) -> TransferConfig:
        """Settings of the transfer connections."""
        return TransferConfig(checksum=self.checksum, curve_key=self.curve_key)


def read_settings(extra: dict[str, Any]) -> Settings:
    """Parse kv_connector_extra_config. Raises ConfigError, naming the key."""
    try:
        settings = msgspec.convert(extra, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error}; known are {', '.join(Settings.__struct_fields__)}"
        ) from error
    settings.rules()
    settings.server_keys()
    return settings
