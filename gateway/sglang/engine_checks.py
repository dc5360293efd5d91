"""Has each decode engine that registers asked how it is set up, before it is sent anything."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.core.runtime.background import Tasks
from headrace.core.types.errors import ConfigError
from headrace.gateway.engine_http import EngineUnreachable

log = logging.getLogger(__name__)

AGAIN_S = 1.0  # until engines that do not answer are asked again
NEWS_S = 10.0  # between two lines about those


class EngineChecks:
    """See the module's docstring. Used by the event loop only.

    probe: asks the engine at a URL; blocking; raises ConfigError for one that cannot be served, EngineUnreachable.
    verified: told the NIXL agent of each rank that was checked, and why it is not served, "" if it is.
    """

    def __init__(self, probe: Callable[[str], object], verified: Callable[[str, str], None]) -> None:
        self._probe = probe
        self._verified = verified
        self._waiting: dict[tuple[str, ...], list[str]] = {}  # agents, by the URLs that are being asked for them
        self._tasks = Tasks()

    async def at_start(self, urls: Sequence[str]) -> None:
        """Ask all engines. Raises ConfigError for one that cannot be served. Those that do not answer are asked when
        they register."""
        for url, error in zip(urls, await self._errors(urls), strict=True):
            if isinstance(error, ConfigError):
                raise error
            log.info("decode engine %s: %s", url, f"{error}; it is asked when it registers" if error else "fits")

    def registered(self, agent: str, urls: tuple[str, ...]) -> None:
        """A rank has registered. urls: of the engines at its address, of which it is one."""
        waiting = self._waiting.setdefault(urls, [])
        waiting.append(agent)
        if len(waiting) == 1:
            self._tasks.start(self._check(urls))

    async def stop(self) -> None:
        """End all checks."""
        await self._tasks.cancel()

    async def _check(self, urls: tuple[str, ...]) -> None:
        """Ask the engines until one of them answers: the one that has registered runs."""
        told = float("-inf")
        while True:
            errors = await self._errors(urls)
            unfit = next((error for error in errors if isinstance(error, ConfigError)), None)
            if unfit is not None or None in errors:
                break
            now = asyncio.get_running_loop().time()
            if now - told >= NEWS_S:
                told = now
                log.warning("decode engine %s has registered and does not answer: %s", " or ".join(urls), errors[0])
            await asyncio.sleep(AGAIN_S)
        if unfit is not None:
            log.warning("%s", unfit)
        for agent in self._waiting.pop(urls):
            self._verified(agent, str(unfit or ""))

    async def _errors(self, urls: Sequence[str]) -> list[Exception | None]:
        return list(await asyncio.gather(*(asyncio.to_thread(self._error, url) for url in urls)))

    def _error(self, url: str) -> Exception | None:
        try:
            self._probe(url)
        except (ConfigError, EngineUnreachable) as error:
            return error
        return None
