"""LoadPlanner, the connector's half in vLLM's scheduler: which request loads which ticket into which blocks. Pure.

on_new_request ──► WAITING ──blocks allocated──► LOADING ──worker has finished──► SETTLED
 (RenewLease)              │ finished, nothing to load (CancelLoad)      │ finished: CancelLoad
                     └─────────────────────────────────────────┴──────► SETTLED

Requests that name the same ticket as an earlier one (n > 1, several prompts in one body) wait until that one is
SETTLED; then they compute what the prefix cache does not have.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import msgspec

from headrace.integrations.vllm.params import LoadRequest, read_load_request
from headrace.peer.commands import AnyCommand, CancelLoad, LoadKv, RejectTicket, RenewLease


class RequestView(Protocol):
    """The fields of vLLM's Request that are read."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any
    mm_features: Any
    prompt_embeds: Any


class LoadState(Enum):
    """States of a Claim; drawn above."""

    WAITING = auto()  # no blocks yet; the ticket's lease is renewed
    LOADING = auto()
    SETTLED = auto()  # loaded, failed or cancelled


@dataclass(slots=True)
class Claim:
    """A request that asks for a ticket."""

    load: LoadRequest
    state: LoadState = LoadState.WAITING
    leader: "Claim | None" = None  # an earlier request with the same ticket, if any


class StepCommands(msgspec.Struct, frozen=True):
    """Commands of one step for the worker."""

    commands: tuple[AnyCommand, ...] = ()
    blocks: dict[str, tuple[int, ...]] = {}
    """vLLM's block ids for the whole prompt of each request to be loaded, by request id."""


class LoadPlanner:
    """Decides loads for one engine; its methods are called by the connector's methods of the scheduler's half."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._leaders: dict[tuple[str, int, str], Claim] = {}
        self._commands: list[AnyCommand] = []
        self._blocks: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Requests with a ticket that have not ended."""
        return len(self._claims)

    def added(self, request: RequestView) -> None:
        """A request has arrived."""
        others = request.lora_request, request.prompt_embeds, request.mm_features or None
        beyond_tokens = any(one is not None for one in others)
        load = read_load_request(request.kv_transfer_params, request.prompt_token_ids, beyond_tokens=beyond_tokens)
        if load is None:
            return
        claim = self._claims[request.request_id] = Claim(load)
        if load.ticket is None:
            return
        claim.leader = self._leaders.get(_key(load))
        if claim.leader is None:
            self._leaders[_key(load)] = claim
            self._commands.append(RenewLease(id=request.request_id, ticket=load.ticket))

    def matched(self, request: RequestView, computed: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond the computed ones, whether asynchronously); (None, False): ask again later.
        Has no side effects."""
        claim = self._claims.get(request.request_id)
        if claim is None or claim.state is not LoadState.WAITING:
            return 0, False
        if claim.leader is not None:
            return (0 if claim.leader.state is LoadState.SETTLED else None), False
        count = claim.load.tokens - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: RequestView, blocks: tuple[int, ...], count: int) -> None:
        """The request has its blocks; its last `count` prompt tokens are to be loaded into them."""
        claim = self._claims.get(request.request_id)
        if claim is None or claim.state is not LoadState.WAITING or claim.leader is not None:
            return
        name, load = request.request_id, claim.load
        if request.kv_transfer_params is not None:
            request.kv_transfer_params["do_remote_prefill"] = False  # a ticket is used once, even if its load fails
        if not count:
            self._settle(claim)
            self._commands.append(CancelLoad(id=name))
            return
        claim.state = LoadState.LOADING
        self._blocks[name] = blocks
        if load.ticket is None or load.refusal is not None:
            code, message = ("", "") if load.refusal is None else (load.refusal.code, load.refusal.message)
            self._commands.append(RejectTicket(id=name, code=code, message=message))
            return
        start = load.tokens - count
        self._commands.append(
            LoadKv(id=name, ticket=load.ticket, start=start, tokens=load.tokens, prompt_hash=load.prompt_hash)
        )

    def loaded(self, names: set[str]) -> None:
        """The worker has finished these requests' loads, successfully or not."""
        for name in names & self._claims.keys():
            self._settle(self._claims[name])

    def finished(self, request: RequestView) -> None:
        """The request has ended for any reason; its ticket is released unless it was used."""
        claim = self._claims.pop(request.request_id, None)
        if claim is None or claim.leader is not None:
            return
        if claim.state is not LoadState.SETTLED:
            self._settle(claim)
            self._commands.append(CancelLoad(id=request.request_id))
        if claim.load.ticket is not None and self._leaders.get(_key(claim.load)) is claim:
            del self._leaders[_key(claim.load)]

    def take_commands(self) -> StepCommands:
        """Commands for the worker since the last step."""
        step = StepCommands(tuple(self._commands), self._blocks)
        self._commands, self._blocks = [], {}
        return step

    def _settle(self, claim: Claim) -> None:
        claim.state = LoadState.SETTLED


def _key(load: LoadRequest) -> tuple[str, int, str]:
    assert load.ticket is not None, "only requests with a readable ticket have a key"
    return load.ticket.host, load.ticket.port, load.ticket.name
