"""Where decode peers reach this server's control endpoint, and the identity that they find there."""

from headrace.core.messages.replies import ServerInfo, StagePools
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.peers.addresses import is_wildcard
from headrace.server.frontend.link.scheduler_client import SchedulerClient


class ControlAddress:
    """Address of the control endpoint. bound_host: the host that it listens on (--transfer-host)."""

    def __init__(self, client: SchedulerClient, bound_host: str) -> None:
        self._client = client
        self._bound_host = bound_host

    @property
    def server_info(self) -> ServerInfo | None:
        """What the scheduler process reported of itself, None before it has."""
        return self._client.server_info

    def require(self) -> ServerInfo:
        """ServerInfo with a control port. Raises HeadraceError (503) while there is none."""
        info = self._client.server_info
        if info is None or not info.control_port:
            raise refusals.LOADING.raised()
        return info

    def require_stages(self) -> tuple[ServerInfo, StagePools]:
        """ServerInfo and what the stages reported, which is known once they have computed anything. Raises
        HeadraceError (503) before."""
        info = self._client.server_info
        if info is None or info.stages is None:
            raise refusals.LOADING.raised()
        return info, info.stages

    def host(self, requested_host: str) -> str:
        """Host under which peers reach the control endpoint: the one that it is bound to, or, if that is all addresses,
        requested_host, under which an HTTP client has reached this server."""
        return reachable_host(self._bound_host, requested_host)


def reachable_host(bound_host: str, requested_host: str) -> str:
    """bound_host, or requested_host if bound_host stands for every address of the machine."""
    return requested_host if is_wildcard(bound_host) else bound_host


def wrong_role(role: str) -> HeadraceError:
    """Of a server that peers do not fetch from (404)."""
    message = f"this server has role {role}; decode servers fetch from a server with --role prefill"
    return HeadraceError(ErrorInfo(code="wrong_role", message=message, status=404))
