"""kv_connector_extra_config: what a user may set."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.allowed import Rules, allowed_prefills
from core.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """allow_prefill: hosts, HOST:PORT or networks whose desks requests may name; loopback unless set. fingerprint: of
    the model, instead of one made from its files. staging_tokens: KV on its way at a time; 0 is twice max_model_len.
    prefill_api_key: shown to HTTP ports that are asked for a desk. checksum: insist on checksums. load_timeout_s:
    silence about one load. connect_timeout_s: no session with a desk."""

    allow_prefill: tuple[str, ...] = ("127.0.0.0/8", "::1/128", "localhost")
    fingerprint: str = ""
    staging_tokens: Annotated[int, Meta(ge=0)] = 0
    prefill_api_key: str = ""
    checksum: bool = True
    load_timeout_s: Seconds = 120.0
    connect_timeout_s: Seconds = 10.0

    def rules(self) -> Rules:
        """Raises ConfigError."""
        return allowed_prefills((), self.allow_prefill)


def read_settings(extra: dict[str, Any]) -> Settings:
    """Raises ConfigError, naming the key."""
    try:
        settings = msgspec.convert(extra, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error}; known are {', '.join(Settings.__struct_fields__)}"
        ) from error
    settings.rules()
    return settings
