"""The allocator of KV pages and of metadata rows: the free list, and the owner of each id."""

from collections.abc import Collection

FREE = 0  # owner of ids that are not allocated


class PageAllocator:
    """Hands out ids in [0, count), O(1) each. Every id has one owner, and only the owner may give it away.

    Owners are non-zero integers. Ids come back last in, first out, so that a small working set stays small.
    """

    def __init__(self, count: int) -> None:
        self._owner = [FREE] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def total(self) -> int:
        """Ids, allocated or not."""
        return len(self._owner)

    @property
    def free(self) -> int:
        """Ids that are not allocated."""
        return len(self._free)

    def owner(self, page: int) -> int:
        """Who has the id; FREE when it is not allocated."""
        return self._owner[page]

    def allocate(self, count: int, owner: int) -> list[int]:
        """Give count ids to owner. Raises ValueError when fewer are free (see `free`), or for FREE as the owner."""
        if owner == FREE:
            raise ValueError("FREE can own nothing")
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} pages asked, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owner[page] = owner
        return pages

    def claim(self, pages: Collection[int], owner: int) -> None:
        """Give certain free ids to owner. Takes time in proportion to all ids. Raises ValueError for one that is not
        free."""
        for page in pages:
            if self._owner[page] != FREE:
                raise ValueError(f"page {page} belongs to {self._owner[page]}")
        for page in pages:
            self._owner[page] = owner
        self._free = [page for page in self._free if self._owner[page] == FREE]

    def transfer(self, page: int, owner: int, new_owner: int) -> None:
        """Pass a page to another owner. Raises ValueError for a page that its owner does not have."""
        self._check(page, owner)
        if new_owner == FREE:
            raise ValueError("a page is freed with release()")
        self._owner[page] = new_owner

    def release(self, pages: list[int], owner: int) -> None:
        """Take pages back. Raises ValueError, taking none, for a page that owner does not have or that comes twice."""
        if len(set(pages)) != len(pages):
            raise ValueError("a page is freed twice in one call")
        for page in pages:
            self._check(page, owner)
        for page in pages:
            self._owner[page] = FREE
        self._free.extend(pages)

    def _check(self, page: int, owner: int) -> None:
        if owner == FREE or self._owner[page] != owner:
            raise ValueError(f"page {page} belongs to {self._owner[page]}, not to {owner}")
