"""KV of turns that decode servers of a replay offer back to the replica that has computed the prompt.

Taken or not is by the code of prefill servers (headrace.core.types.requests.kv_return), with what the replica's
Scheduler says of its pool, and what transfers have taken.
"""

from collections import Counter
from collections.abc import Callable

from headrace.core.messages.frontend import QueryPrefix
from headrace.core.messages.replies import PrefixReply
from headrace.core.types.packed import packed_length
from headrace.core.types.requests.kv_return import MAX_TAKEN, MOVE_S, ReturnReason, judge_return
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.scheduler import Event
from headrace.server.routing.handoff_cost import TransferCosts
from headrace.server.routing.prefix_choice import compute_s
from headrace.testing.world import World
from headrace.tools.simulate.replay.prefix_fetches import ReplayFetches


class ReplayReturns:
    """Takes KV for one replica. The pages of all servers have the same size."""

    def __init__(self, world: World, page_size: int, fetches: ReplayFetches, handle: Callable[[Event], None]) -> None:
        """handle: takes the replica's events."""
        self._world = world
        self._page_size = page_size
        self._fetches = fetches
        self._handle = handle
        self._costs = TransferCosts(lambda: world.now)
        self._offers: dict[
            int, tuple[str, bytes, RequestTerms, Callable[[], None]]
        ] = {}  # by the token of the question
        self._number = 0
        self._moving = 0
        self.results: Counter[str] = Counter()
        """Offers by what became of them: taken (it has come), failed, or why it was not taken."""

    def offer(self, server: str, tokens: bytes, terms: RequestTerms, ended: Callable[[], None]) -> None:
        """A decode server offers the KV of these tokens, whole pages. terms: whose they are. ended: called when it has
        come or will not."""
        self._number += 1
        self._offers[self._number] = server, tokens, terms, ended
        self._handle(QueryPrefix(token=self._number, prompt=tokens, salt=terms.prefix_salt))

    def replied(self, here: PrefixReply) -> None:
        """The scheduler has said what it has of an offer."""
        server, tokens, terms, ended = self._offers.pop(here.token)
        missing = packed_length(tokens) - here.cached
        reason = self._judge(server, packed_length(tokens), here)
        if reason != "taken":
            self.results[reason] += 1
            ended()
            return
        began = self._world.now
        self._moving += 1

        def moved(came: bool) -> None:
            self._moving -= 1
            self.results["taken" if came else "failed"] += 1
            if came:
                self._costs.observe(server, missing, self._world.now - began)
            ended()

        def fetch() -> None:
            self._fetches.fetch(server, tokens, terms, MOVE_S, moved)

        self._world.at(began, fetch)

    def _judge(self, server: str, offered: int, here: PrefixReply) -> ReturnReason:
        if self._moving >= MAX_TAKEN:
            return "busy"
        work_s = None if here.cost is None else compute_s(here.cost, here.cached, offered)
        transfer_s = self._costs.seconds(server, offered - here.cached)
        return judge_return(here.pool, offered, self._page_size, work_s, transfer_s)
