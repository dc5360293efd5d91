"""Probe of an SGLang decode engine: how it is set up, asked over HTTP before it is sent anything.

Its messages name neither its release nor its page size, nor what its numbers are. A page of another size, or of as many
bytes of another dtype, would be filled with what is no KV there. Blocking; to be called on a thread of its own.

Source: GET /server_info of SGLang 0.5.23, sglang/srt/entrypoints/http_server.py.
"""

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.engine_http import get_json
from headrace.gateway.sglang_nixl.releases import RELEASES

AUTO = "auto"
DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
"""Short names of dtypes."""


class EngineSetup(msgspec.Struct, frozen=True):
    """GET /server_info: what is needed of it. The values are those that the engine has worked out of its flags."""

    version: str
    page_size: int
    dtype: str
    kv_cache_dtype: str
    disaggregation_mode: str
    disaggregation_transfer_backend: str
    pp_size: int = 1
    speculative_algorithm: str | None = None


def probe(url: str, geometry: Geometry, *, api_key: str = "", allow_untested: bool = False) -> EngineSetup:
    """Ask an engine how it is set up.

    url: of its HTTP server. geometry: of the KV that it would be sent, with the page size that it has to have.
    allow_untested: also serve releases that are not in releases.py. Raises EngineUnreachable when it does not answer,
    ConfigError, naming both values, when it cannot be served.
    """
    try:
        setup: EngineSetup = get_json(url, "/server_info", api_key, EngineSetup, "SGLang")
        _check(setup, geometry, allow_untested)
    except ConfigError as error:
        raise ConfigError(f"decode engine {url}: {error}") from error
    return setup


def _check(setup: EngineSetup, geometry: Geometry, allow_untested: bool) -> None:
    """Raises ConfigError."""
    if setup.version not in RELEASES and not allow_untested:
        raise ConfigError(
            f"SGLang {setup.version}; tested are {', '.join(RELEASES)}. Another release may speak another protocol, "
            "which has no version: --allow-untested tries it"
        )
    wanted = {
        "--disaggregation-mode": (setup.disaggregation_mode, "decode"),
        "--disaggregation-transfer-backend": (setup.disaggregation_transfer_backend, "nixl"),
        "--page-size": (setup.page_size, geometry.page_size),
        "--pp-size": (setup.pp_size, 1),
        "--speculative-algorithm": (setup.speculative_algorithm, None),
    }
    for name, (theirs, served) in wanted.items():
        if theirs != served:
            hint = "; --sglang-page-size has to name the engine's" if name == "--page-size" else ""
            raise ConfigError(f"{name} is {theirs} at the decode engine; this gateway serves {served}{hint}")
    theirs = setup.dtype if setup.kv_cache_dtype == AUTO else setup.kv_cache_dtype
    if theirs != AUTO and DTYPES.get(theirs, theirs) != geometry.dtype:
        raise ConfigError(
            f"its KV is {theirs} (--dtype {setup.dtype}, --kv-cache-dtype {setup.kv_cache_dtype}), that of the prefill "
            f"servers {geometry.dtype}"
        )
