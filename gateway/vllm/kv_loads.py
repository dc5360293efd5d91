"""Loads of KV for an event loop: hands commands to the peer thread, and its results back.

event loop ──begin, release──► peer thread ──results──► pump thread ──► event loop
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from headrace.core.messages.replies import PrefillState
from headrace.core.types import errors
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.peer.commands import (
    AnyResult,
    CancelLoad,
    LoadCancelled,
    Loaded,
    LoadFailed,
    LoadKv,
    ReleaseLoad,
)
from headrace.peer.thread import PeerFailed, PeerThread

log = logging.getLogger(__name__)

WAIT_S = 3600.0  # for results; the end of the peer thread is one
_STATUSES = {errors.TOO_LONG: 400, errors.QUEUE_FULL: 429, errors.NO_PEER: 504, errors.DEADLINE: 504, "timeout": 504}


class KvLoads:
    """Loads as futures. Methods are called in the event loop, but for release().

    peer: not started yet. on_state: told of sessions with prefill servers. on_end: called if the peer thread fails.
    """

    def __init__(
        self, peer: PeerThread, on_state: Callable[[PrefillState], None], on_end: Callable[[str], None]
    ) -> None:
        self._peer = peer
        self._on_state = on_state
        self._on_end = on_end
        self._open: dict[str, asyncio.Future[Loaded]] = {}
        self._stopping = False

    def start(self) -> None:
        """Start the peer thread."""
        self._peer.start()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._pump, args=(loop,), name="headrace-results", daemon=True).start()

    def stop(self) -> None:
        """End all sessions and the peer thread."""
        self._stopping = True
        if self._peer.is_alive():
            self._peer.stop()

    def begin(self, command: LoadKv) -> "asyncio.Future[Loaded]":
        """Load KV. The future fails with HeadraceError, which is the prefill server's; once it has its result, the
        pages are the caller's until release() or give_up()."""
        future = self._open[command.id] = asyncio.get_running_loop().create_future()
        self._peer.submit(command)
        return future

    def give_up(self, load: str) -> None:
        """Cancel a load, or release it if it has come."""
        if (future := self._open.pop(load, None)) is not None:
            future.cancel()
        self._peer.submit(CancelLoad(id=load), ReleaseLoad(id=load))

    def release(self, load: str) -> None:
        """The pages of a load are not needed any more. Called by any thread."""
        self._peer.submit(ReleaseLoad(id=load))

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        """The pump thread."""
        reason = ""
        try:
            while True:
                results = self._peer.results(WAIT_S)
                if results:
                    loop.call_soon_threadsafe(self._deliver, results)
        except PeerFailed as error:
            reason = str(error)
        except RuntimeError:  # the event loop is closed
            return
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, reason)

    def _deliver(self, results: Sequence[AnyResult]) -> None:
        for result in results:
            match result:
                case PrefillState():
                    self._on_state(result)
                case Loaded():
                    self._resolve(result.id, result)
                case LoadFailed():
                    self._resolve(result.id, load_error(result))
                case LoadCancelled():
                    pass  # give_up() has forgotten it

    def _resolve(self, load: str, result: Loaded | HeadraceError) -> None:
        future = self._open.pop(load, None)
        if future is None or future.done():
            return  # given up: ReleaseLoad is on its way
        if isinstance(result, HeadraceError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _ended(self, reason: str) -> None:
        """The peer thread has ended, and every load with it."""
        message = f"the gateway's connections to prefill servers have ended: {reason}"
        for future in self._open.values():
            future.set_exception(HeadraceError(ErrorInfo(code="internal_error", message=message, status=500)))
        self._open.clear()
        if not self._stopping:
            self._on_end(message)


def load_error(failed: LoadFailed) -> HeadraceError:
    """The error of a load that has failed. Its status is that of its code."""
    status = _STATUSES.get(failed.code, 502)
    return HeadraceError(ErrorInfo(code=failed.code, message=failed.message, status=status, at_prefill=True))
