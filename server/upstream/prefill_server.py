"""One prefill server of a decode server: its addresses, and what is known of its state."""

import asyncio
import contextlib
from collections.abc import Collection
from urllib.parse import urlsplit

from headrace.core.types.peers.addresses import url
from headrace.core.types.peers.allow_list import canonical
from headrace.server.upstream.discovery_client import Discovery, Feature
from headrace.server.upstream.handoff_params import PrefillAddress

SILENT = "its control endpoint does not answer"


class PrefillServer:
    """One prefill server and its state."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self.host = canonical(parts.hostname or "")
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.users = 0  # open requests that name it
        self.up = False  # the scheduler has a session with its control endpoint
        self.reason = "not reached yet"  # why it is down
        self.changed_at: float | None = None  # when it was last reached or lost
        self.target: Discovery | None = None  # what the scheduler was told to connect to
        self.was_up = False
        self.unfit = False  # down, and trying again does not help
        self.attempts = 0  # to discover it, that have begun
        self.failed = 0  # the last of them that failed
        self.changed = asyncio.Event()  # set when one of these changes
        self.wanted = asyncio.Event()  # set to have it discovered now and not after the pause

    def knows(self, features: Collection[Feature]) -> bool:
        """Whether prompts that need these features may be sent to it."""
        return not features or (self.target is not None and all(map(self.target.knows, features)))

    @property
    def knows_logprobs_start(self) -> bool:
        """Whether prompts sent to it may have prompt_logprobs_start."""
        return self.target is not None and self.target.prompt_logprobs_start

    @property
    def knows_hints(self) -> bool:
        """Whether prompts sent to it may have kv_hints."""
        return self.target is not None and self.target.kv_hints

    @property
    def knows_prefixes(self) -> bool:
        """Whether it hands over what its prefix cache has."""
        return self.target is not None and self.target.prefixes

    @property
    def knows_session_id(self) -> bool:
        """Whether prompts sent to it may have session_id."""
        return self.target is not None and self.target.session_id

    @property
    def page_size(self) -> int:
        """Tokens of a page there; 1 while that is not known."""
        return 1 if self.target is None else max(1, self.target.page_size)

    @property
    def knows_resume(self) -> bool:
        """Whether prompts sent to it may have resume."""
        return self.target is not None and self.target.resume

    def endpoint(self, control_port: int) -> str:
        """ZMQ address of the control endpoint at this port."""
        return url("tcp", urlsplit(self.url).hostname or "", control_port)

    def matches(self, address: PrefillAddress) -> bool:
        """Whether a request with this address means this server."""
        found = self.target
        if found is not None and address.engine and address.engine == found.instance:
            return True
        if canonical(address.host) != self.host:
            return False
        if address.kind == "control":
            return found is not None and address.port == found.control_port
        return address.port == self.port or (found is not None and address.port == found.bootstrap_port)

    async def found(self, within_s: float) -> bool:
        """Have a server that is down discovered now, and wait for it as long as it may come up."""
        before = self.attempts
        self.wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not (self.up or self.unfit or self.failed > before):
                    await self._next_change()
        self.reason = self.reason or SILENT
        return self.up

    async def came_up(self, within_s: float) -> bool:
        """Wait for so long at most until it is up."""
        try:
            async with asyncio.timeout(within_s):
                while not self.up:
                    await self._next_change()
        except TimeoutError:
            self.reason = self.reason or SILENT
        return self.up

    async def until_down(self) -> None:
        """Wait until it is down."""
        while self.up:
            await self._next_change()

    async def _next_change(self) -> None:
        self.changed.clear()
        await self.changed.wait()
