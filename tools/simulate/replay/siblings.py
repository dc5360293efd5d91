"""Prefixes that a replica of a replay fetches from its siblings before it computes a prompt.

Chosen is by the code of prefill servers (headrace.server.routing.prefix_choice).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.core.messages.replies import PrefixReply
from headrace.core.types.packed import ITEM_BYTES
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.scheduler import Scheduler
from headrace.server.routing.handoff_cost import TransferCosts
from headrace.server.routing.prefix_choice import HeldPrefix, PrefixChoice, choose_sibling, worth_asking
from headrace.testing.world import World
from headrace.tools.simulate.replay.prefix_fetches import ReplayFetches
from headrace.tools.simulate.replay.terms import whose


class Sibling(Protocol):
    """Another replica, as it is asked for prefixes."""

    def prefix(self, prompt: bytes, salt: str) -> PrefixReply:
        """What it has of a prompt."""
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
        self._costs = TransferCosts(lambda: world.now)

    def bring(self, prompt: bytes, terms: RequestTerms, go_on: Callable[[], None]) -> None:
        """Call go_on when what is worth fetching has come, or is late; at once where nothing is."""
        length, salt = len(prompt) // ITEM_BYTES, terms.prefix_salt
        usable = (length - 1) // self._page_size * self._page_size
        here = self._scheduler.prefix(prompt, salt)
        cached, in_tiers = here.pool.held, here.pool.in_tiers.total
        if not worth_asking(here.cost, cached, usable):
            go_on()
            return
        replies = {name: sibling.prefix(prompt, salt) for name, sibling in self._siblings.items()}
        found = [each for name, reply in replies.items() for each in _held(name, reply, usable)]
        choice = choose_sibling(
            here.cost, cached, found, lambda name, tokens: self._costs.seconds(name, tokens + in_tiers)
        )
        if choice is None:
            go_on()
        else:
            tokens = choice.held.tokens
            self._fetch(choice, tokens - here.cached, prompt[: tokens * ITEM_BYTES], terms, go_on)

    def _fetch(
        self, choice: PrefixChoice, tokens: int, prompt: bytes, terms: RequestTerms, go_on: Callable[[], None]
    ) -> None:
        began = self._world.now

        def timed(_came: bool) -> None:
            self._costs.observe(choice.held.server, tokens, self._world.now - began - choice.held.load_s)
            go_on()

        self._fetches.fetch(choice.held.server, prompt, whose(terms), choice.deadline_s, timed)


def _held(name: str, found: PrefixReply, usable: int) -> list[HeldPrefix]:
    """What a sibling has, in its pool and with its tiers."""
    return [
        HeldPrefix(name, min(usable, found.pool.cached)),
        HeldPrefix(name, min(usable, found.pool.held), found.load_s),
    ]
