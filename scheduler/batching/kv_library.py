"""KV files: which slots of the library tier their pages have, in every replica.

the front end lists files ─► OpenKvFile ─► every stage, which reads nothing yet
                             nodes in the prefix tree ─► a prompt hits them ─► LoadPages

A file has one range of slots for each salt whose prompts may use it, since their pages have other names. Pages that
could not be loaded are forgotten, and entered again when the front end has looked again.
"""

from dataclasses import dataclass, field

from headrace.core.messages.frontend import ListKvFiles
from headrace.core.messages.orders import CloseKvFile, OpenKvFile
from headrace.core.types.kv.kv_files import KvFile
from headrace.core.types.kv.kv_tiers import LIBRARY, LIBRARY_PAGES
from headrace.core.types.kv.page_digests import root_digest, text_digests
from headrace.scheduler.state.state import State


@dataclass(slots=True, eq=False)
class Range:
    """Consecutive slots for the pages of a file under one salt."""

    first: int
    root: bytes
    """Digest of the salt."""
    digests: tuple[bytes, ...]
    """Of its pages."""

    @property
    def slots(self) -> range:
        """Its slots."""
        return range(self.first, self.first + len(self.digests))


@dataclass(slots=True, eq=False)
class ListedFile:
    """A file that is used."""

    file: KvFile
    ranges: list[Range] = field(default_factory=list)


class KvLibrary:
    """The KV files that the front end has listed."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._files: dict[tuple[str, bytes], ListedFile] = {}  # by location and digest
        self._closed: list[Range] = []  # slots that a page may still have, of files that are gone

    def listed(self, event: ListKvFiles) -> None:
        """The front end has looked for files."""
        wanted = {(file.location, file.digest): file for file in event.files}
        for key in [key for key in self._files if key not in wanted]:
            self._close(self._files.pop(key))
        for key, file in wanted.items():
            if key not in self._files:
                self._files[key] = self._open(file)
        self._enter()

    def stages_up(self) -> None:
        """The stages have started anew, and know no file."""
        if not self._files:
            return
        self._closed.clear()
        for listed in self._files.values():
            self._order(listed)
        self._enter()

    def _open(self, file: KvFile) -> ListedFile:
        config = self._state.config
        listed = ListedFile(file)
        for salt in config.library_salts:
            digests = tuple(text_digests(file.tokens, config.page_size, salt.encode()))
            first = self._room(len(digests), listed)
            if first is None:
                break  # the front end lists no more than fit; slots of closed files come free
            listed.ranges.append(Range(first, root_digest(salt.encode()), digests))
        self._order(listed)
        return listed

    def _order(self, listed: ListedFile) -> None:
        out, file = self._state.out, listed.file
        if not self._state.engine.ready:
            return  # see stages_up()
        for each in listed.ranges:
            pages = len(each.digests)
            out.add(
                OpenKvFile(
                    seq=out.next_seq(), first=each.first, pages=pages, location=file.location, digest=file.digest
                )
            )

    def _close(self, listed: ListedFile) -> None:
        for each in listed.ranges:
            for replica in self._state.replicas:
                if replica.cache.tiers is not None:
                    replica.cache.tiers.lost(LIBRARY, each.slots)
            if self._state.engine.ready:
                out = self._state.out
                out.add(CloseKvFile(seq=out.next_seq(), first=each.first))
        self._closed += listed.ranges

    def _enter(self) -> None:
        """Have found what is listed and has no node (any more)."""
        files = [(each.root, each.digests, each.first) for listed in self._files.values() for each in listed.ranges]
        for replica in self._state.replicas:
            tiers = replica.cache.tiers
            if tiers is not None and (tiers.incomplete or tiers.slots(LIBRARY).used < sum(len(f[1]) for f in files)):
                tiers.enter(files)

    def _room(self, count: int, own: ListedFile) -> int | None:
        """The first of so many consecutive slots that no file has; None where there are none."""
        self._closed = [each for each in self._closed if self._in_use(each)]
        used = [each for listed in (*self._files.values(), own) for each in listed.ranges] + self._closed
        at = 0
        for each in sorted(used, key=lambda each: each.first):
            if each.first - at >= count:
                break
            at = each.slots.stop
        return at if at + count <= LIBRARY_PAGES else None

    def _in_use(self, closed: Range) -> bool:
        slots = [replica.cache.tiers.slots(LIBRARY) for replica in self._state.replicas if replica.cache.tiers]
        return any(one.node(slot) is not None for one in slots for slot in closed.slots)
