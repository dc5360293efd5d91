"""KV hints without a request: what is to become of cached KV, as orchestrators and agents know it."""

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import KvHint
from headrace.core.messages.replies import KvHinted
from headrace.core.types.requests.kv_hints import Demote, HintAction, HintResult, Keep, Prefetch, Release
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State

BOUND = "beyond the tenant's share of the pool (--retain-percent)"
NOTHING = "the cache has no whole page of it"
NO_TIER = "there is no tier to copy it to"
IN_USE = "others use it"
NAMES: dict[type[HintAction], str] = {Keep: "retain", Prefetch: "prefetch", Demote: "demote", Release: "release"}


class KvHints:
    """Grants hints at every replica that has KV of the prompt."""

    def __init__(self, state: State) -> None:
        self._state = state

    def handle(self, event: KvHint, now: float) -> None:
        """Act on the hints of one prompt, in their order."""
        results = tuple(self._act(event, action, now) for action in event.actions)
        self._state.out.add(KvHinted(token=event.token, results=results))

    def _act(self, event: KvHint, action: HintAction, now: float) -> HintResult:
        granted = max((_grant(replica, event, action, now) for replica in self._state.replicas), default=0)
        size = self._state.config.page_size
        self._state.metrics.hint(NAMES[type(action)], granted)
        reason = "" if granted else self._why(event, action, self._state.config)
        return HintResult(tokens=granted * size, reason=reason)

    def _why(self, event: KvHint, action: HintAction, config: SchedulerConfig) -> str:
        caches = [replica.cache for replica in self._state.replicas]
        known = any(cache.resident(event.prompt, event.terms.prefix_salt) for cache in caches)
        match action:
            case Keep():
                return BOUND if known else NOTHING
            case Prefetch():
                return NOTHING if config.retain_percent else BOUND
            case Demote() if all(cache.tiers is None for cache in caches):
                return NO_TIER
            case _:
                return IN_USE if known else NOTHING


def _grant(replica: Replica, event: KvHint, action: HintAction, now: float) -> int:
    """Pages for which a replica grants an action."""
    cache, salt = replica.cache, event.terms.prefix_salt
    match action:
        case Keep(seconds=seconds, priority=priority):
            return cache.retain(cache.resident(event.prompt, salt), now + seconds, priority)
        case Prefetch(seconds=seconds, priority=priority):
            return cache.prefetch(event.prompt, salt, event.terms.tenant, now + seconds, priority)
        case Demote():
            return cache.demote(cache.resident(event.prompt, salt))
        case Release():
            return cache.let_go(cache.resident(event.prompt, salt))
