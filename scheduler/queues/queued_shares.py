"""What the tenants of a server have queued, of all replicas: requests and prompt tokens that no plan has begun."""

from collections.abc import Iterable, Iterator

from headrace.core.shares import Shares
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request

QUEUED = (Phase.BOOTSTRAP, Phase.WAITING)


class QueuedShares:
    """Requests and tokens in the phases BOOTSTRAP and WAITING, by the name of the API key. Keys without a name are one
    tenant, whatever cache salts come with them: clients choose these."""

    def __init__(self) -> None:
        self.requests = Shares()
        self.tokens = Shares()

    def count(self, request: Request, sign: int) -> None:
        """A request enters its phase (1), or leaves it (-1)."""
        if request.phase in QUEUED:
            self.requests.add(request.submit.tenant, sign)
            self.tokens.add(request.submit.tenant, sign * request.prompt_tokens)

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Counts that are wrong."""
        queued = [request for request in requests if request.phase in QUEUED]
        counted = (self.requests.total, self.tokens.total)
        if counted != (found := (len(queued), sum(request.prompt_tokens for request in queued))):
            yield f"{counted} requests and tokens counted as queued by tenants; there are {found}"
