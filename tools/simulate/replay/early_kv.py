"""An open prompt of a decode server of a replay: a prefill server computes its pieces, and their KV comes early.

    change ─► the prefill server's open prompt ─► a look after a pause ─► fetch what is worth it ─► look again …

As RemotePrompt and EarlyKv of the server do, by the same rule (headrace.server.routing.early_fetch).
"""

from collections.abc import Callable

import msgspec

from headrace.core.runtime.rate_limit import Backoff
from headrace.core.types.packed import ITEM_BYTES, packed_length
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.routing.early_fetch import FETCH_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, early_fetch
from headrace.testing.world import World
from headrace.tools.simulate.replay.prefix_fetches import ReplayFetches
from headrace.tools.simulate.replay.replica import ReplayReplica
from headrace.tools.simulate.replay.terms import at_prefill, whose


class ReplayEarlyKv:
    """One open prompt."""

    def __init__(
        self,
        world: World,
        rid: str,
        prefill: ReplayReplica,
        replica: int,
        fetches: ReplayFetches,
        page_size: int,
        message_s: float,
    ) -> None:
        """prefill: the server that it is opened at, replica its number. fetches: of the decode server, which is
        connected to it. message_s: seconds that a message to it takes."""
        self._world = world
        self._rid = rid
        self._prefill = prefill
        self.replica = replica
        self._fetches = fetches
        self._page_size = page_size
        self._message_s = message_s
        self._prompt = b""
        self._terms = RequestTerms()
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._changed = False
        self._looking = False
        self._committed = False
        self._here = 0
        self._seen = 0
        self._fetch = ""  # name of the one under way

    def change(self, prompt: bytes, terms: RequestTerms) -> None:
        """It is opened, or has grown to these tokens. terms: those of its pieces."""
        self._prompt, self._terms, self._changed = prompt, terms, True
        self._tell(lambda: self._prefill.open_prompts.change(self._rid, prompt, at_prefill(terms)))
        if not self._looking:
            self._looking = True
            self._look_later()

    def commit(self) -> None:
        """It is complete: nothing more comes early, and the prefill server finishes its piece."""
        self._committed = True
        self._fetches.cancel(self._fetch)
        self._tell(lambda: self._prefill.open_prompts.commit(self._rid, lambda: None))

    def _tell(self, action: Callable[[], None]) -> None:
        self._world.at(self._world.now + self._message_s, action)

    def _look_later(self) -> None:
        if self._changed:
            self._changed = False
            self._pauses.reset()
        self._world.at(self._world.now + self._pauses.next_delay() + self._message_s, self._look)

    def _look(self) -> None:
        """See how much is computed, and fetch if there is enough."""
        if self._committed:
            return
        computed, sent = self._prefill.open_prompts.computed(self._rid), packed_length(self._prompt)
        due = early_fetch(sent, computed, self._seen, self._here, self._page_size)
        self._seen = computed
        if not due.tokens:
            self._looked(due.ended)
            return

        def moved(came: bool) -> None:
            self._here = due.tokens if came else self._here
            self._looked(due.ended)

        terms = msgspec.structs.replace(whose(self._terms), retain=self._terms.retain)
        prompt = self._prompt[: due.tokens * ITEM_BYTES]
        self._fetch = self._fetches.fetch(self._prefill.name, prompt, terms, FETCH_S, moved)

    def _looked(self, ended: bool) -> None:
        """Look again, unless all has come until the prompt grows."""
        self._looking = not ended or self._changed
        if self._looking and not self._committed:
            self._look_later()
