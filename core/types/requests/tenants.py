"""Settings of the tenants of a server: the keys that they send, the priorities that they may use, what is theirs."""

import hashlib
from collections.abc import Sequence

from headrace.core.types.errors import ConfigError


def tenant_keys(given: Sequence[str]) -> dict[str, str]:
    """API keys by the name of their tenant, from NAME=KEY. Raises ConfigError for anything else, and for a name or a
    key that comes twice."""
    keys: dict[str, str] = {}
    for each in given:
        name, separator, key = each.partition("=")
        if not separator or not key or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ConfigError("--tenant-key takes NAME=KEY, with a name of letters, digits, '.', '-' and '_'")
        if name in keys or key in keys.values():
            raise ConfigError(f"--tenant-key {name}=…: another tenant has this name or this key")
        keys[name] = key
    return keys


def tenant_salt(tenant: str, salt: str) -> str:
    """The salt of the prefix cache for a tenant's requests with this salt of the client: no other tenant has it,
    whatever salts its clients send. That of requests without a tenant is the client's."""
    if not tenant:
        return salt
    return hashlib.sha256(f"tenant {tenant}\0{salt}".encode()).hexdigest()


def priority_ranges(given: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Lowest and highest priority by tenant, "" for all others, from LOW:HIGH and NAME=LOW:HIGH. Raises ConfigError for
    anything else."""
    ranges: dict[str, tuple[int, int]] = {}
    for each in given:
        name, _, bounds = each.rpartition("=")
        low, _, high = bounds.partition(":")
        try:
            ranges[name] = int(low), int(high)
        except ValueError:
            raise ConfigError(f"--priority-range {each}: write LOW:HIGH, or NAME=LOW:HIGH for one tenant") from None
        if ranges[name][0] > ranges[name][1]:
            raise ConfigError(f"--priority-range {each}: {low} is above {high}; the lower one comes first")
    return ranges
