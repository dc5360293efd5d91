"""Builds the configuration: defaults, then a TOML file, then environment variables, then flags."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.config import Config, EngineConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.requests.tenants import tenant_keys, tenant_salt
from headrace.engine.device import cpu_flags
from headrace.server.config.consistency import check
from headrace.server.config.settings import BY_KEY, SETTINGS, Setting
from headrace.server.config.toml_file import read_toml
from headrace.server.config.values import parse_value

CPUINFO_VARIABLE = "HEADRACE_CPUINFO"


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Returns the configuration that flags (by key, as argparse left them) and the environment describe.

    Raises ConfigError for unknown keys, wrong types, values out of bounds and settings that contradict each other.
    """
    values = read_values(flags, environ, SETTINGS)
    if folder := _cache_folder(environ):
        values.setdefault("cache-dir", folder)
    config = _build(values)
    check(config)
    engine = msgspec.structs.replace(config.engine, cpuinfo=find_cpuinfo(environ))
    return msgspec.structs.replace(config, engine=engine)


def read_values(flags: Mapping[str, Any], environ: Mapping[str, str], settings: Sequence[Setting]) -> dict[str, Any]:
    """The values that are given of these settings, by key: in the file that flags name as config, in the environment,
    in flags, the last one counts. Raises ConfigError."""
    known = {setting.key: setting for setting in settings}
    values: dict[str, Any] = {}
    path = flags.get("config")
    if path is not None:
        values |= read_toml(Path(path), known)
    values |= _environment(environ, settings)
    for key, given in flags.items():
        if key in known:
            values[key] = parse_value(known[key], given, known[key].option)
    return values


def find_cpuinfo(environ: Mapping[str, str]) -> str:
    """The file with the flags of this machine's CPU. HEADRACE_CPUINFO names another one than the system's, so that
    tests can run as on another CPU. Raises ConfigError when that one has no flags."""
    path = environ.get(CPUINFO_VARIABLE, "")
    if not path:
        return EngineConfig().cpuinfo
    try:
        flags = cpu_flags(path)
    except OSError as error:
        raise ConfigError(f"{CPUINFO_VARIABLE}: cannot read {path}: {error.strerror}") from error
    if not flags:
        raise ConfigError(f"{CPUINFO_VARIABLE}: expected a file like /proc/cpuinfo, with a line of flags, got {path}")
    return str(Path(path).absolute())


def _environment(environ: Mapping[str, str], settings: Sequence[Setting]) -> dict[str, Any]:
    """Values of the environment variables that are set, by key. A list is separated by commas."""
    values: dict[str, Any] = {}
    for setting in settings:
        variable = setting.flag.variable
        given = environ.get(variable, "").strip() if variable else ""
        if not given:
            continue
        if setting.kind == "list":
            values[setting.key] = tuple(item.strip() for item in given.split(",") if item.strip())
        else:
            values[setting.key] = parse_value(setting, given, variable)
    return values


def _cache_folder(environ: Mapping[str, str]) -> str:
    """The cache folder by the XDG base directory specification; empty for a user without a home."""
    if base := environ.get("XDG_CACHE_HOME", ""):
        return str(Path(base) / "headrace")
    home = environ.get("HOME", "")
    return str(Path(home) / ".cache" / "headrace") if home else ""


def _build(values: Mapping[str, Any]) -> Config:
    """Distributes the values over the slices."""
    fields: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        setting = BY_KEY[key]
        fields.setdefault(setting.slice, {})[setting.field] = value
    if prefill := fields.get("server", {}).get("prefill"):
        fields["server"]["prefill"] = tuple(url.rstrip("/") for url in prefill)
    slices = {field.name: field.type(**fields.get(field.name, {})) for field in msgspec.structs.fields(Config)}
    return copy_shared(Config(**slices))


def copy_shared(config: Config) -> Config:
    """Fills the copies of fields that belong to other slices."""
    scheduler = msgspec.structs.replace(
        config.scheduler,
        page_size=config.engine.page_size,
        kv_pages=config.engine.kv_pages,
        max_model_len=config.model.max_model_len,
        kv_events=config.kv_events.port != 0,
        library_salts=_library_salts(config) if config.engine.kv_library else (),
    )
    engine = msgspec.structs.replace(
        config.engine, pass_tokens=scheduler.chunk_tokens, cache_dir=config.server.cache_dir
    )
    return msgspec.structs.replace(config, scheduler=scheduler, engine=engine)


def _library_salts(config: Config) -> tuple[str, ...]:
    """Cache salts of requests that come without one: of those without a tenant, and of each tenant."""
    if config.server.share_prefixes:
        return ("",)
    return ("", *(tenant_salt(name, "") for name in tenant_keys(config.server.tenant_keys)))
