"""How often an idle server checks its own state: the walk over all pages is spread over many probes."""

PAGES_PER_PROBE = 1024  # of the KV pool: walked in about 0.2 ms
UNCHANGED_PROBES = 64  # between two checks of a state that no event has changed


class IdleCheck:
    """Decides at which probes of an idle server the integrity check runs, which takes time in proportion to the pages.

    It runs at the first probe after a change, but once in as many probes as keep the mean at PAGES_PER_PROBE pages a
    probe. What has not changed since a check that found no problem is checked again UNCHANGED_PROBES later.
    """

    def __init__(self) -> None:
        self._changed = True
        self._probes: int | None = None  # since the last check

    def changed(self) -> None:
        """An event or a deadline may have changed the state."""
        self._changed = True

    def due(self, pages: int) -> bool:
        """Whether this probe checks the state. pages: of all KV pools."""
        if self._probes is None:
            return True
        self._probes += 1
        spread = pages // PAGES_PER_PROBE
        return self._probes >= (spread if self._changed else max(spread, UNCHANGED_PROBES))

    def checked(self, clean: bool) -> None:
        """The whole state has been checked. clean: no problem was found."""
        self._changed = not clean
        self._probes = 0
