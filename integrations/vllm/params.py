"""kv_transfer_params: how a request to vLLM names its ticket."""

from typing import Any
from urllib.parse import urlsplit

import msgspec

from headrace.core.types.allow_list import canonical
from headrace.core.types.packed import pack, prompt_hash
from headrace.integrations.peer.commands import TicketRef
from headrace.transfer.protocol.messages import Host, Name, PortNumber, Positive, Ticket

PROMPT_MISMATCH = "prompt_mismatch"
BAD_PARAMS = "bad_kv_transfer_params"
BOOTSTRAP_PORT = 8998  # where Mooncake and SGLang ask when nobody says otherwise


class KvParams(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that are read; all others are skipped. A prefill server's answer has what is needed.

    ticket, or tickets with one entry for each prompt of the request; or transfer_id. remote_host, remote_port: the
    control endpoint of the prefill server; or remote_bootstrap_addr: its HTTP port, which tells where the control
    endpoint is. prompt_hashes: of the prompts, in the order of the tickets (headrace.core.types.packed.prompt_hash).
    remote_num_tokens: their lengths, one number for a
    sole one. fingerprint: of the prefill server's model. wait: the prompt may still be on its way to it; by default it
    may unless remote_num_tokens is there, since only a computed prompt has that.
    """

    remote_host: Host | None = None
    remote_port: PortNumber | None = None
    remote_bootstrap_addr: Name | None = None
    transfer_id: Ticket | None = None
    ticket: Ticket | None = None
    tickets: tuple[Ticket, ...] | None = None
    prompt_hashes: tuple[Name, ...] | None = None
    remote_num_tokens: Positive | tuple[Positive, ...] | None = None
    fingerprint: Name | None = None
    wait: bool | None = None

    def reference(self, name: str) -> TicketRef | None:
        """The ticket of that name; None when nothing says where it is."""
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
        """(the ticket of the prompt with this many tokens and this hash, what speaks against it or "")."""
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


class Refusal(msgspec.Struct, frozen=True):
    """Why a ticket must not be loaded."""

    code: str
    message: str


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for. ticket: None when none could be read. refusal: None when it may be loaded."""

    ticket: TicketRef | None
    tokens: int
    prompt_hash: str = ""
    refusal: Refusal | None = None


def read_wish(params: dict[str, Any] | None, prompt: list[int] | None, *, beyond_tokens: bool) -> LoadRequest | None:
    """What kv_transfer_params asks for; None when they ask for nothing. beyond_tokens: its KV does not
    follow from its token ids alone (a LoRA adapter, images, embeddings), and no hash of them would tell."""
    if not params or not params.get("do_remote_prefill"):
        return None
    tokens = list(prompt or ())
    try:
        read = msgspec.convert(params, KvParams)
    except msgspec.ValidationError as error:
        return LoadRequest(ticket=None, tokens=len(tokens), refusal=Refusal(BAD_PARAMS, str(error)))
    digest = prompt_hash(pack(tokens))
    name, problem = read.choose(len(tokens), digest)
    ticket = read.reference(name) if name else None
    refusal = Refusal(PROMPT_MISMATCH if name else BAD_PARAMS, problem) if problem else None
    if ticket is None and refusal is None:
        refusal = Refusal(BAD_PARAMS, "neither remote_host with remote_port nor remote_bootstrap_addr says where it is")
    if not tokens or beyond_tokens:
        refusal = Refusal(
            "not_supported", "only prompts that are token ids and nothing else (LoRA, images, embeddings) are fetched"
        )
    return LoadRequest(ticket=ticket, tokens=len(tokens), prompt_hash=digest, refusal=refusal)


def _split(address: str) -> tuple[str | None, int | None]:
    """Host and port of http://HOST:PORT or HOST:PORT; nothing when it is neither."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return parts.hostname, parts.port or BOOTSTRAP_PORT
    except ValueError:
        return None, None
