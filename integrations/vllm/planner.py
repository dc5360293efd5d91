"""The connector's half in vLLM's scheduler: which request loads which ticket, and what the worker is told. Pure.

on_new_request ──► WAITING ──blocks allocated──► LOADING ──worker has finished──► SETTLED
 (RenewLease)              │ finished, nothing to load (CancelLoad)      │ finished: CancelLoad
                     └─────────────────────────────────────────┴──────► SETTLED

Requests that name a ticket which another one has named already (n > 1, several prompts in one body) wait until that
one has settled, and compute what the prefix cache does not give them.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import msgspec

from headrace.integrations.peer.commands import AnyCommand, CancelLoad, LoadKv, RejectTicket, RenewLease
from headrace.integrations.vllm.params import LoadRequest, read_wish


class RequestView(Protocol):
    """What is read of vLLM's Request."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any
    mm_features: Any
    prompt_embeds: Any


class LoadState(Enum):
    WAITING = auto()
    LOADING = auto()
    SETTLED = auto()


@dataclass(slots=True)
class Claim:
    """A request that asks for a ticket. leader: the request that named it first, if that is another one."""

    wish: LoadRequest
    state: LoadState = LoadState.WAITING
    leader: "Claim | None" = None


class Orders(msgspec.Struct, frozen=True):
    """For the worker, once a step. blocks: by request, vLLM's blocks for the whole prompt."""

    commands: tuple[AnyCommand, ...] = ()
    blocks: dict[str, tuple[int, ...]] = {}


class LoadPlanner:
    """One for each engine."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._leaders: dict[tuple[str, int, str], Claim] = {}
        self._commands: list[AnyCommand] = []
        self._blocks: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def added(self, request: RequestView) -> None:
        """A request has come in."""
        others = request.lora_request, request.prompt_embeds, request.mm_features or None
        beyond_tokens = any(one is not None for one in others)
        wish = read_wish(request.kv_transfer_params, request.prompt_token_ids, beyond_tokens=beyond_tokens)
        if wish is None:
            return
        claim = self._claims[request.request_id] = Claim(wish)
        if wish.ticket is None:
            return
        claim.leader = self._leaders.get(_key(wish))
        if claim.leader is None:
            self._leaders[_key(wish)] = claim
            self._commands.append(RenewLease(id=request.request_id, ticket=wish.ticket))

    def matched(self, request: RequestView, computed: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond the computed ones, whether that is asynchronous); (None, False): ask
        again later. Has no side effects."""
        claim = self._claims.get(request.request_id)
        if claim is None or claim.state is not LoadState.WAITING:
            return 0, False
        if claim.leader is not None:
            return (0 if claim.leader.state is LoadState.SETTLED else None), False
        count = claim.wish.tokens - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: RequestView, blocks: tuple[int, ...], count: int) -> None:
        """The request has its blocks; `count` of its tokens are to be loaded into them."""
        claim = self._claims.get(request.request_id)
        if claim is None or claim.state is not LoadState.WAITING or claim.leader is not None:
            return
        name, wish = request.request_id, claim.wish
        if request.kv_transfer_params is not None:
            request.kv_transfer_params["do_remote_prefill"] = False  # whatever happens, a ticket serves once
        if not count:
            self._settle(claim)
            self._commands.append(CancelLoad(id=name))
            return
        claim.state = LoadState.LOADING
        self._blocks[name] = blocks
        if wish.ticket is None or wish.refusal is not None:
            code, message = ("", "") if wish.refusal is None else (wish.refusal.code, wish.refusal.message)
            self._commands.append(RejectTicket(id=name, code=code, message=message))
            return
        start = wish.tokens - count
        self._commands.append(
            LoadKv(id=name, ticket=wish.ticket, start=start, tokens=wish.tokens, prompt_hash=wish.prompt_hash)
        )

    def loaded(self, names: set[str]) -> None:
        """The worker has finished with these requests, well or not."""
        for name in names & self._claims.keys():
            self._settle(self._claims[name])

    def finished(self, request: RequestView) -> None:
        """The request has ended, however; its ticket is let go unless it was used."""
        claim = self._claims.pop(request.request_id, None)
        if claim is None or claim.leader is not None:
            return
        if claim.state is not LoadState.SETTLED:
            self._settle(claim)
            self._commands.append(CancelLoad(id=request.request_id))
        if claim.wish.ticket is not None and self._leaders.get(_key(claim.wish)) is claim:
            del self._leaders[_key(claim.wish)]

    def take(self) -> Orders:
        """What the worker is to be told in this step."""
        orders = Orders(tuple(self._commands), self._blocks)
        self._commands, self._blocks = [], {}
        return orders

    def _settle(self, claim: Claim) -> None:
        claim.state = LoadState.SETTLED


def _key(wish: LoadRequest) -> tuple[str, int, str]:
    assert wish.ticket is not None, "only readable wishes have a key"
    return wish.ticket.host, wish.ticket.port, wish.ticket.name
