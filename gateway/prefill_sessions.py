"""Sessions of a gateway's peer thread with prefill servers, which PrefillPool asks for as it asks a scheduler.

PrefillPool ──AddPrefill, RemovePrefill──► peer thread ──ServerState──► PrefillPool.update()
"""

import asyncio

from headrace.core.messages.frontend import AddPrefill, AnyFrontendRequest, RemovePrefill
from headrace.core.messages.replies import PrefillState
from headrace.core.types.errors import ConfigError
from headrace.peer.commands import ConnectServer, DisconnectServer, ServerState
from headrace.server.upstream.prefill_pool import PrefillPool

CHECK_S = 0.1


def session_command(message: AnyFrontendRequest) -> ConnectServer | DisconnectServer:
    """The peer thread's command for what a PrefillPool posts."""
    match message:
        case AddPrefill(name=name, endpoint=endpoint):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            return ConnectServer(name=name, host=host.strip("[]"), port=int(port))
        case RemovePrefill(name=name):
            return DisconnectServer(name=name)
        case _:
            raise TypeError(f"a gateway has no scheduler for {type(message).__name__}")


def prefill_state(state: ServerState) -> PrefillState:
    """What a PrefillPool is told of a session."""
    return PrefillState(name=state.name, up=state.up, reason=state.reason, unfit=state.incompatible)


async def wait_connected(prefills: PrefillPool) -> None:
    """Wait until a prefill server is connected. Raises ConfigError if none of them fits the decode engines."""
    while not prefills.up():
        if all(server.unfit for server in prefills.servers()):
            reasons = "; ".join(f"{server.url}: {server.reason}" for server in prefills.servers())
            raise ConfigError(f"no prefill server fits the decode engines: {reasons}")
        await asyncio.sleep(CHECK_S)
