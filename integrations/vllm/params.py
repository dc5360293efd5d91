"""kv_transfer_params: how a request to vLLM names its ticket."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.allowed import canonical
from core.arrays import pack, prompt_hash
from core.errors import PROMPT_MISMATCH
from integrations.peer.commands import TicketRef
from transfer.messages import Host, Name, PortNumber, Positive, Ticket

HexHash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class KvParams(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that are read; all others are skipped. ticket, remote_host, remote_port: what to fetch, at which desk.
    remote_num_tokens: tokens of the prompt; an answer of a prefill server has it, and its prompt is computed then.
    prompt_hash: SHA-256 (hex) of its ids as packed little-endian int32. model_fingerprint: of the server's model. wait:
    the prompt may still be on its way to the prefill server; by default it may unless remote_num_tokens is there."""

    ticket: Ticket
    remote_host: Host
    remote_port: PortNumber
    remote_num_tokens: Positive | None = None
    prompt_hash: HexHash | None = None
    model_fingerprint: Name | None = None
    wait: bool | None = None

    def reference(self) -> TicketRef:
        wait = self.remote_num_tokens is None if self.wait is None else self.wait
        return TicketRef(
            name=self.ticket,
            host=canonical(self.remote_host),
            port=self.remote_port,
            wait=wait,
            fingerprint=self.model_fingerprint or "",
        )

    def mismatch(self, tokens: list[int], digest: bytes) -> str:
        """How the prompt is not the one that the ticket is said to be for; "" when nothing says so."""
        if self.remote_num_tokens not in (None, len(tokens)):
            return f"the prompt has {len(tokens)} tokens here, {self.remote_num_tokens} there"
        if self.prompt_hash not in (None, digest.hex()):
            return f"the prompt's hash is {digest.hex()} here, {self.prompt_hash} there"
        return ""


class Refusal(msgspec.Struct, frozen=True):
    """Why a ticket must not be loaded."""

    code: str
    message: str


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for. ticket: None when it could not be read. refusal: None when it may be loaded."""

    ticket: TicketRef | None
    tokens: int
    prompt_hash: bytes = b""
    refusal: Refusal | None = None


def read_wish(params: dict[str, Any] | None, prompt: list[int] | None, *, adapter: bool) -> Wish | None:
    """What kv_transfer_params asks for; None when they ask for nothing. adapter: the request uses a LoRA, which no
    prefill server knows of."""
    if not params or not params.get("do_remote_prefill"):
        return None
    tokens = list(prompt or ())
    try:
        read = msgspec.convert(params, KvParams)
    except msgspec.ValidationError as error:
        return Wish(ticket=None, tokens=len(tokens), refusal=Refusal("bad_kv_transfer_params", str(error)))
    ticket = read.reference()
    if not tokens or adapter:
        what = "a prompt without token ids" if not tokens else "a request with a LoRA adapter"
        return Wish(ticket=ticket, tokens=len(tokens), refusal=Refusal("not_supported", f"{what} cannot be fetched"))
    digest = prompt_hash(pack(tokens))
    problem = read.mismatch(tokens, digest)
    refusal = Refusal(PROMPT_MISMATCH, problem) if problem else None
    return Wish(ticket=ticket, tokens=len(tokens), prompt_hash=digest, refusal=refusal)
