"""RemotePrefill: a prompt's KV from a prefill server as a DynamicCache, from which transformers' generate()
continues."""

import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
from torch import Tensor
from transformers import DynamicCache

from headrace.core.config import TransferConfig
from headrace.core.messages.http_prefill import JSON_HEADERS, PREFILL_PATH, PrefillRequest
from headrace.core.types.errors import ConfigError, ErrorInfo, HeadraceError, invalid
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack, prompt_hash
from headrace.core.types.peers.allow_list import allowed_prefills, canonical
from headrace.engine.model.config import ModelSpec, spec_from_config
from headrace.engine.model.families import BY_MODEL_TYPE
from headrace.engine.model.fingerprint import fingerprint
from headrace.integrations.http_client import PROMPT_TIMEOUT, bearer, connection_error, direct_client
from headrace.peer.commands import Loaded, LoadFailed, LoadKv, ReleaseLoad, TicketRef
from headrace.peer.records import PeerLimits
from headrace.peer.staging import Staging
from headrace.peer.thread import PeerThread
from headrace.transfer.sockets.curve_keys import known_servers

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
STAGING_TOKENS = 8192  # default length of the longest prompt


class ModelWeights:
    """A Checkpoint (engine/model/checkpoint.py) over the weights of a model in memory."""

    def __init__(self, model: Any) -> None:
        """model: a transformers PreTrainedModel."""
        self._weights: dict[str, Tensor] = model.state_dict()

    def read(self, name: str, shape: tuple[int, ...], rows: list[int] | None = None) -> Tensor:
        """A tensor of the given shape, or only these rows of its first axis, on the CPU.

        Raises ConfigError when it is missing or has another shape.
        """
        found = self._weights.get(name)
        if found is None or tuple(found.shape) != shape:
            there = "missing" if found is None else f"of shape {list(found.shape)}"
            raise ConfigError(f"tensor {name} of shape {list(shape)} is {there} in the model")
        return (found if rows is None else found[rows]).cpu()


class RemotePrefill:
    """Connection of a local transformers model to a prefill server with the same weights and dtype; a context
    manager."""

    def __init__(
        self,
        url: str,
        model: Any,
        *,
        api_key: str = "",
        tokens: int = STAGING_TOKENS,
        curve_key: str = "",
        curve_server_keys: Sequence[str] = (),
    ) -> None:
        """url: of the prefill server's HTTP port. model: a transformers PreTrainedModel. tokens: length of the longest
        prompt. curve_key: file with this side's CURVE keys, "" for connections in the clear. curve_server_keys: FILE
        with the server's public key, or HOST=FILE or HOST:PORT=FILE for one of several servers.

        Raises ConfigError for a model that prefill servers cannot run, and for missing key files.
        """
        self._model = model
        server_keys = known_servers(curve_key, curve_server_keys)
        spec = model_spec(model)
        self._spec = spec
        self._staging = Staging(cache_geometry(spec, DTYPES[model.dtype]), tokens)
        parts = urlsplit(url)
        self._host, self._port = canonical(parts.hostname or ""), parts.port or 80
        self._http = direct_client(base_url=url, headers=bearer(api_key), timeout=PROMPT_TIMEOUT)
        limits = PeerLimits(
            fingerprint=fingerprint(spec, ModelWeights(model)),
            model=model.name_or_path,
            rules=allowed_prefills((url,), ()),
            pages=self._staging.pages,
            server_keys=server_keys,
        )
        self._peer = PeerThread(
            limits,
            self._staging,
            name="transformers",
            max_model_len=tokens,
            transfer=TransferConfig(curve_key=curve_key),
            api_key=api_key,
        )
        self._peer.start()

    def __enter__(self) -> "RemotePrefill":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session with the prefill server."""
        self._peer.stop()
        self._http.close()

    def prefill(self, input_ids: Tensor) -> DynamicCache:
        """Have the prefill server compute a prompt, and fetch its cache.

        input_ids: int64 [1, tokens]. Raises HeadraceError.
        """
        ticket = f"transformers-{secrets.token_hex(16)}"
        body = PrefillRequest(
            prompt_token_ids=_tokens(input_ids), ticket=ticket, handoff="hold", max_tokens=2, ignore_eos=True
        )
        try:
            answer = self._http.post(PREFILL_PATH, content=body.encoded(), headers=JSON_HEADERS)
        except httpx.HTTPError as error:
            raise HeadraceError(connection_error(str(self._http.base_url), error)) from error
        if answer.status_code != 200:
            text = f"the prefill server answered {answer.status_code}: {answer.text}"
            raise HeadraceError(ErrorInfo(code="prefill_failed", message=text, status=answer.status_code))
        return self.fetch(ticket, input_ids)

    def fetch(self, ticket: str, input_ids: Tensor) -> DynamicCache:
        """Fetch the cache of the prompt that is held under a ticket.

        input_ids: int64 [1, tokens], the same prompt; another one is refused. The cache has all tokens but the last,
        which generate() computes for its logits. Raises HeadraceError.
        """
        tokens = _tokens(input_ids)
        place = TicketRef(name=ticket, host=self._host, port=self._port, http=True)
        name = secrets.token_hex(16)
        self._peer.submit(
            LoadKv(id=name, ticket=place, start=0, tokens=len(tokens), prompt_hash=prompt_hash(pack(tokens)))
        )
        while True:
            for result in self._peer.results(wait_s=1.0):
                if isinstance(result, Loaded) and result.id == name:
                    return self._cache(result)
                if isinstance(result, LoadFailed) and result.id == name:
                    raise HeadraceError(ErrorInfo(code=result.code, message=result.message, status=502))

    def _cache(self, loaded: Loaded) -> DynamicCache:
        """Copy loaded KV from the staging area into a cache on the model's device."""
        staged = torch.from_numpy(self._staging.data).view(self._model.dtype)
        cache = DynamicCache(config=self._model.config)
        for layer, planes in enumerate(staged[:, :, None, :, loaded.at : loaded.at + loaded.count - 1]):
            keys, values = planes if self._spec.mla is None else latent_cache(self._spec, planes[0])
            cache.update(keys.to(self._model.device, copy=True), values.to(self._model.device, copy=True), layer)
        self._peer.submit(ReleaseLoad(id=loaded.id))
        return cache


def model_spec(model: Any) -> ModelSpec:
    """Specification of a transformers model. Raises ConfigError for an architecture or dtype that Headrace cannot
    run."""
    if model.dtype not in DTYPES:
        raise ConfigError(f"the model computes in {model.dtype}; expected one of {', '.join(DTYPES.values())}")
    return spec_from_config({**model.config.to_dict(), "architectures": [type(model).__name__]})


def cache_geometry(spec: ModelSpec, dtype: str) -> Geometry:
    """Geometry of the whole model's KV, with page size 1."""
    if spec.mla is not None:
        return spec.mla.geometry(dtype, 1, range(spec.layers))
    return Geometry(dtype, spec.layers, spec.kv_heads, spec.head_dim, page_size=1)


def latent_cache(spec: ModelSpec, slots: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers keeps as keys and values of a layer with latent attention: latents, and rotated keys.

    slots: [1, 1, tokens, width of a slot]. DeepSeek-V2's keys are rotated in pairs there, as in the pool, DeepSeek-V3's
    from pairs to halves.
    """
    assert spec.mla is not None
    latents, rotated = slots[..., : spec.mla.kv_rank], slots[..., spec.mla.kv_rank :]
    if BY_MODEL_TYPE[spec.family].halved_keys:
        rotated = torch.cat((rotated[..., ::2], rotated[..., 1::2]), dim=-1)
    return latents, rotated


def _tokens(input_ids: Tensor) -> list[int]:
    """Token ids of input_ids [1, tokens]. Raises HeadraceError (400) for another shape."""
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise invalid("input_ids", f"input_ids has the shape {list(input_ids.shape)}; expected [1, tokens]")
    tokens: list[int] = input_ids[0].tolist()
    return tokens
