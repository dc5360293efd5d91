"""Prefixes that a replica of a replay fetches from its siblings before it computes a prompt.

Chosen is by the code of prefill servers (headrace.server.routing.prefix_choice).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.core.types.packed import ITEM_BYTES
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.scheduler import Scheduler
from headrace.server.routing.handoff_cost import HandoffCost
from headrace.server.routing.prefix_choice import PrefixChoice, choose_sibling, worth_asking
from headrace.testing.world import World
from headrace.tools.simulate.replay.prefix_fetches import ReplayFetches
from headrace.tools.simulate.replay.terms import whose


class Sibling(Protocol):
    """Another replica, as it is asked for prefixes."""

    def cached_tokens(self, prompt: bytes, salt: str) -> int:
        """Leading tokens that it has cached."""
        ...


class SiblingFetches:
    """Chooses what one replica fetches from its siblings."""

    def __init__(
        self,
        world: World,
        scheduler: Scheduler,
        page_size: int,
        siblings: Mapping[str, Sibling],
        fetches: ReplayFetches,
    ) -> None:
        """siblings: by name, as they are connected."""
        self._world = world
        self._scheduler = scheduler
        self._page_size = page_size
        self._siblings = siblings
        self._fetches = fetches
        self._costs = {name: HandoffCost() for name in siblings}

    def bring(self, prompt: bytes, terms: RequestTerms, go_on: Callable[[], None]) -> None:
        """Call go_on when what is worth fetching has come, or is late; at once where nothing is."""
        length, salt = len(prompt) // ITEM_BYTES, terms.prefix_salt
        usable = (length - 1) // self._page_size * self._page_size
        cached = self._scheduler.cached_tokens(prompt, salt)
        _, per_token, trusted, _ = self._scheduler.load(self._world.now)
        cost = per_token if trusted else None
        if not worth_asking(cost, cached, usable):
            go_on()
            return
        found = {name: min(usable, sibling.cached_tokens(prompt, salt)) for name, sibling in self._siblings.items()}
        choice = choose_sibling(cost, cached, found, lambda name, tokens: self._costs[name].seconds(tokens))
        if choice is None:
            go_on()
        else:
            self._fetch(choice, choice.tokens - cached, prompt[: choice.tokens * ITEM_BYTES], terms, go_on)

    def _fetch(
        self, choice: PrefixChoice, tokens: int, prompt: bytes, terms: RequestTerms, go_on: Callable[[], None]
    ) -> None:
        began = self._world.now

        def timed(_came: bool) -> None:
            self._costs[choice.server].observe(tokens, self._world.now - began)
            go_on()

        self._fetches.fetch(choice.server, prompt, whose(terms), choice.deadline_s, timed)
