"""Probe of a vLLM decode engine: what it is, asked over HTTP and its NIXL side channel before it is offered anything.

Blocking; to be called on a thread of its own.
"""

import re
from socket import create_connection, gaierror, getaddrinfo

import msgspec
import zmq

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.addresses import url as make_url
from headrace.gateway.engine_http import MAX_BYTES, TIMEOUT_S, EngineUnreachable, decoded, get_json
from headrace.gateway.vllm_nixl.compatibility import ONE_GROUP, Observed, explain_mismatch, find_factors
from headrace.gateway.vllm_nixl.releases import RELEASES, connector_version
from headrace.gateway.vllm_nixl.wire import LAYOUT, AgentMetadata, HandshakePayload, encode_query

MAKE = "vLLM"
OF_GROUPS = ("KV cache groups", "order of layers")  # what is otherwise where layers of a model have several caches
_LAYER = re.compile(r"\.(\d+)\.")
_AGENT = b"nixlSerDes|Agent"  # begins an agent's metadata; then the length of its name in 8 bytes, and the name


class EngineGone(EngineUnreachable):
    """Nothing listens at the engine's side channel: its process has ended, or has not started."""


class DecodeEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A decode engine that was probed and can be served."""

    url: str
    side_channel: tuple[str, int]
    engine_id: str
    """Id of this run of its engine core."""
    agent: str
    """Name of its NIXL agent; "" if its metadata does not show it."""
    vllm_version: str
    model: str
    """As given to its --model."""
    served_names: tuple[str, ...]
    """Names under which requests may ask for the model itself."""
    adapters: tuple[str, ...]
    """Names of LoRA adapters of it."""
    max_model_len: int
    geometry: Geometry
    """KV of the whole model; page_size is the engine's block size."""
    compatibility_hash: str
    metadata: AgentMetadata
    """Metadata of its first worker."""
    addresses: tuple[str, ...] = ()
    """IP addresses of its side channel's host, from which it asks, too, unless there is a proxy."""

    def differs_from(self, other: "DecodeEngine") -> str:
        """What keeps two engines from being served with the same KV, with both values; "" if nothing does. Their
        releases may differ."""
        for name in ("model", "geometry"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name.replace('_', ' ')}: {ours} at {self.url}, {theirs} at {other.url}"
        for name in ("kv_cache_layout", "region_names", "attn_backend_name"):
            ours, theirs = getattr(self.metadata, name), getattr(other.metadata, name)
            if ours != theirs:
                return f"{name}: {ours} at {self.url}, {theirs} at {other.url}"
        return ""


class ModelCard(msgspec.Struct, frozen=True):
    """An entry of GET /v1/models."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]


class _Version(msgspec.Struct, frozen=True):
    version: str


def model_card(text: str) -> ModelCard | None:
    """The value of --decode-model-card, None for an empty one. Raises ConfigError."""
    if not text:
        return None
    try:
        card = msgspec.json.decode(text, type=ModelCard)
    except NO_MESSAGE as error:
        raise ConfigError(f"--decode-model-card is no entry of GET /v1/models in JSON: {error}") from error
    if not card.id or not card.root or not card.max_model_len or card.max_model_len < 1:
        raise ConfigError("--decode-model-card needs id, root (their --model) and max_model_len")
    return card


def probe(
    url: str,
    side_channel: tuple[str, int],
    *,
    api_key: str = "",
    allow_untested: bool = False,
    card: ModelCard | None = None,
) -> DecodeEngine:
    """Ask an engine what it is, and verify its compatibility hash.

    url: of its HTTP server. side_channel: VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT of its first data-parallel rank.
    allow_untested: also serve versions of vLLM that are not in releases.py. card: of its model, if it has no API server
    to ask; its release is found by its hash. Raises EngineUnreachable when it does not answer, ConfigError, naming both
    values, when it cannot be served.
    """
    try:
        if card is not None:
            payload = ask_side_channel(side_channel)
            return _by_hash(url, side_channel, card, payload)
        version = get_json(url, "/version", "", _Version, MAKE).version
        models = get_json(url, "/v1/models", api_key, _ModelList, MAKE).data
        payload = ask_side_channel(side_channel)
        return _verified(url, side_channel, version, models, payload, allow_untested=allow_untested)
    except ConfigError as error:
        raise ConfigError(f"decode engine {url}: {error}") from error


def ask_side_channel(address: tuple[str, int], timeout_s: float = TIMEOUT_S) -> HandshakePayload:
    """The handshake of an engine. Raises EngineGone when the connection is refused, EngineUnreachable when there is no
    answer in time, ConfigError for an answer of another kind."""
    name = f"its side channel {make_url('tcp', *address)}"
    endpoint = make_url("tcp", _listening_at(name, address, timeout_s), address[1])
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        closed = socket.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(endpoint)
            socket.send(encode_query())
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(closed, zmq.POLLIN)
            ready = dict(poller.poll(int(timeout_s * 1000)))
            if socket in ready:
                decode = msgspec.msgpack.Decoder(HandshakePayload).decode
                payload: HandshakePayload = decoded("its side channel", decode, socket.recv_multipart()[0], MAKE)
                return payload
            if closed in ready:
                raise EngineGone(f"{name} has closed the connection: no ZMQ socket listens there")
            raise EngineUnreachable(f"{name} does not answer within {timeout_s:g} s")
        finally:
            socket.disable_monitor()
            closed.close()


def _listening_at(name: str, address: tuple[str, int], timeout_s: float) -> str:
    """IP address of a host at which something listens: the first one of several. A name that is not found says nothing
    of the engine. Raises EngineGone, EngineUnreachable."""
    try:
        with create_connection(address, timeout_s) as connection:
            return str(connection.getpeername()[0])
    except ConnectionRefusedError as error:
        raise EngineGone(f"nothing listens at {name}") from error
    except OSError as error:
        raise EngineUnreachable(f"{name}: {error.strerror or error}") from error


def _by_hash(url: str, side_channel: tuple[str, int], card: ModelCard, payload: HandshakePayload) -> DecodeEngine:
    """The engine as the first release whose hash it has. Raises ConfigError."""
    for version in reversed(RELEASES):
        try:
            return _verified(url, side_channel, version, (card,), payload, allow_untested=False)
        except ConfigError as error:
            refused = error
    raise ConfigError(f"of vLLM {', '.join(RELEASES)} none fits; as the first one: {refused}")


def _verified(
    url: str,
    side_channel: tuple[str, int],
    version: str,
    models: tuple[ModelCard, ...],
    payload: HandshakePayload,
    *,
    allow_untested: bool,
) -> DecodeEngine:
    """The engine, if it can be served. Raises ConfigError."""
    if version not in RELEASES and not allow_untested:
        tested = ", ".join(RELEASES)
        raise ConfigError(
            f"vLLM {version}; tested are {tested}. Another version may speak another protocol: --allow-untested tries "
            "it, as long as its compatibility hash is met"
        )
    base = [card for card in models if card.parent is None and card.root]
    if not base:
        raise ConfigError("GET /v1/models names no model with a root")
    metadata: AgentMetadata = decoded(
        f"its handshake, not one of NixlConnector version {connector_version(version)},",
        msgspec.msgpack.Decoder(AgentMetadata).decode,
        payload.agent_metadata_bytes,
        MAKE,
    )
    _check_layout(metadata)
    observed = Observed(
        vllm_version=version,
        model=base[0].root or "",
        layers=len(metadata.kv_caches_base_addr),
        token_bytes=metadata.block_lens[0] // metadata.block_size,
        attn_backend_name=metadata.attn_backend_name,
    )
    factors = find_factors(payload.compatibility_hash, observed)
    if factors is None:
        raise ConfigError(explain_mismatch(payload.compatibility_hash, observed))
    return DecodeEngine(
        url=url,
        side_channel=side_channel,
        engine_id=metadata.engine_id,
        agent=agent_name(metadata.agent_metadata),
        vllm_version=version,
        model=observed.model,
        served_names=tuple(card.id for card in base if card.root == base[0].root),
        adapters=tuple(card.id for card in models if card.parent is not None),
        max_model_len=base[0].max_model_len or 0,
        geometry=Geometry(
            factors.dtype.removeprefix("torch."),
            factors.num_hidden_layers,
            factors.num_kv_heads,
            factors.head_size,
            metadata.block_size,
        ),
        compatibility_hash=payload.compatibility_hash,
        metadata=metadata,
        addresses=_addresses(side_channel[0]),
    )


def _addresses(host: str) -> tuple[str, ...]:
    """IP addresses of a host; none for a name that is not found."""
    try:
        found = getaddrinfo(host, None)
    except gaierror:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _check_layout(metadata: AgentMetadata) -> None:
    """Raises ConfigError, naming both values, unless the cache is one of full attention in one group, in blocks of the
    expected layout."""
    regions = len(metadata.kv_caches_base_addr)
    if not regions or len(metadata.block_lens) != regions or metadata.block_size < 1:
        raise ConfigError(
            f"its KV cache has {regions} regions, {len(metadata.block_lens)} block lengths and blocks of "
            f"{metadata.block_size} tokens"
        )
    wanted = {
        "kv_cache_layout": (metadata.kv_cache_layout, LAYOUT),
        "KV cache groups": (len(set(metadata.region_group_ids or (0,))), 1),
        "different block lengths": (len(set(metadata.block_lens)), 1),
        "kernel blocks in a block": (metadata.physical_blocks_per_logical_kv_block, 1),
        "decode context parallel size": (metadata.dcp_size, 1),
        "prefill context parallel size": (metadata.pcp_size, 1),
        "sizes of SSM states": (tuple(metadata.ssm_sizes), (0, 0)),
        "length of PLE states": (metadata.ple_block_len, None),
        "packed layers": (len(metadata.packed_member_layouts), 0),
        "order of layers": (_layer_order(metadata.region_names, regions), "ascending"),
        "bytes left over in a token": (metadata.block_lens[0] % metadata.block_size, 0),
    }
    for name, (theirs, served) in wanted.items():
        if theirs != served:
            hint = f"; {ONE_GROUP}" if name in OF_GROUPS else ""
            raise ConfigError(f"{name}: {theirs} at the decode engine; this gateway serves {served}{hint}")


def _layer_order(names: tuple[str, ...] | None, regions: int) -> str:
    """ "ascending" if the regions are the layers 0, 1, 2, ..., or their names."""
    if names is None:
        return "ascending"
    numbers = [int(found[1]) if (found := _LAYER.search(f".{name}.")) else -1 for name in names]
    return "ascending" if numbers == list(range(regions)) else ", ".join(names)


def agent_name(metadata: bytes) -> str:
    """Name of the NIXL agent that made this metadata; "" if it does not begin as NIXL 1.5's does."""
    if not metadata.startswith(_AGENT):
        return ""
    start = len(_AGENT) + 8
    length = int.from_bytes(metadata[len(_AGENT) : start], "little")
    name = metadata[start : start + length]
    return name.decode(errors="replace") if len(name) == length <= 256 else ""
