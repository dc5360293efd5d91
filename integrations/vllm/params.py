"""Parser of kv_transfer_params: how a request to vLLM names its ticket."""

from typing import Any
from urllib.parse import urlsplit

import msgspec

from headrace.core.types.packed import pack, prompt_hash
from headrace.core.types.peers.allow_list import canonical
from headrace.peer.commands import TicketRef
from headrace.transfer.protocol.messages import Host, Name, PortNumber, Positive, Ticket

PROMPT_MISMATCH = "prompt_mismatch"
BAD_PARAMS = "bad_kv_transfer_params"
BOOTSTRAP_PORT = 8998  # default of Mooncake and SGLang


class KvParams(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of kv_transfer_params that are read; others are ignored. A prefill server's answer has all of them."""

    remote_host: Host | None = None
    remote_port: PortNumber | None = None
    """Port of the control endpoint of the prefill server, with remote_host."""
    remote_bootstrap_addr: Name | None = None
    """Or its HTTP server, http://HOST:PORT, which is asked for the control port."""
    transfer_id: Ticket | None = None
    """The ticket, under Mooncake's name."""
    ticket: Ticket | None = None
    tickets: tuple[Ticket, ...] | None = None
    """Or one ticket for each prompt of the request."""
    prompt_hashes: tuple[Name, ...] | None = None
    """Hashes of the prompts, in the order of the tickets (headrace.core.types.packed.prompt_hash)."""
    remote_num_tokens: Positive | tuple[Positive, ...] | None = None
    """Lengths of the prompts, in the order of the tickets; a number for a single ticket."""
    fingerprint: Name | None = None
    """Fingerprint of the prefill server's model."""
    wait: bool | None = None
    """The prompt may still be on its way to the prefill server. Default: True unless remote_num_tokens is given, which
    only a computed prompt has."""

    def reference(self, name: str) -> TicketRef | None:
        """The ticket of this name with its server; None when no server is given."""
        host, port, over_http = self.remote_host, self.remote_port, False
        if host is None and self.remote_bootstrap_addr is not None:
            host, port, over_http = *_split(self.remote_bootstrap_addr), True
        if not host or port is None:
            return None
        return TicketRef(
            name=name,
            host=canonical(host),
            port=port,
            http=over_http,
            wait=self.remote_num_tokens is None if self.wait is None else self.wait,
            fingerprint=self.fingerprint or "",
        )

    def choose(self, tokens: int, digest: str) -> tuple[str, str]:
        """The ticket for a prompt of this many tokens and this hash: (ticket, "") or (ticket or "", reason for
        refusal)."""
        single = self.ticket or self.transfer_id
        names = self.tickets or ((single,) if single else ())
        if not names:
            return "", "there is neither a ticket nor tickets nor a transfer_id"
        given = self.remote_num_tokens
        lengths = given if isinstance(given, tuple) else (given,) * len(names)
        hashes = self.prompt_hashes or (digest,) * len(names)
        if not len(names) == len(lengths) == len(hashes):
            return names[0], f"{len(names)} tickets, {len(hashes)} prompt_hashes, {len(lengths)} remote_num_tokens"
        fits = [index for index in range(len(names)) if lengths[index] in (None, tokens) and hashes[index] == digest]
        if fits:
            return names[fits[0]], ""
        return names[0], f"{tokens} tokens with hash {digest} here; {lengths} with hashes {hashes} there"


class LoadRefusal(msgspec.Struct, frozen=True):
    """Why a ticket must not be loaded."""

    code: str
    message: str


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The KV that a request to vLLM asks for."""

    ticket: TicketRef | None
    """None when kv_transfer_params could not be read."""
    tokens: int
    """Length of the prompt."""
    prompt_hash: str = ""
    refusal: LoadRefusal | None = None
    """Why it must not be loaded; None when it may."""


def read_load_request(
    params: dict[str, Any] | None, prompt: list[int] | None, *, beyond_tokens: bool
) -> LoadRequest | None:
    """Parse kv_transfer_params; None when the request asks for no remote prefill.

    beyond_tokens: the KV does not follow from the token ids alone (LoRA adapter, images, embeddings), so a hash of the
    prompt does not identify it.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    tokens = list(prompt or ())
    try:
        read = msgspec.convert(params, KvParams)
    except msgspec.ValidationError as error:
        return LoadRequest(ticket=None, tokens=len(tokens), refusal=LoadRefusal(BAD_PARAMS, str(error)))
    digest = prompt_hash(pack(tokens))
    name, problem = read.choose(len(tokens), digest)
    ticket = read.reference(name) if name else None
    refusal = LoadRefusal(PROMPT_MISMATCH if name else BAD_PARAMS, problem) if problem else None
    if ticket is None and refusal is None:
        refusal = LoadRefusal(
            BAD_PARAMS, "neither remote_host with remote_port nor remote_bootstrap_addr says where it is"
        )
    if not tokens or beyond_tokens:
        refusal = LoadRefusal(
            "not_supported", "only prompts that are token ids and nothing else (LoRA, images, embeddings) are fetched"
        )
    return LoadRequest(ticket=ticket, tokens=len(tokens), prompt_hash=digest, refusal=refusal)


def _split(address: str) -> tuple[str | None, int | None]:
    """Host and port of http://HOST:PORT or HOST:PORT; (None, None) for anything else."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return parts.hostname, parts.port or BOOTSTRAP_PORT
    except ValueError:
        return None, None
