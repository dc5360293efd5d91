"""The free list of KV pages (and of metadata rows): who owns which one."""

FREE = 0


class PageAllocator:
    """Hands out ids in [0, count), O(1) each. Every id has one owner, and only the owner may give it away.

    Owners are non-zero integers; FREE (0) owns what nobody has. Ids come back last in, first out, so that a
    small working set stays small.
    """

    def __init__(self, count: int) -> None:
        self._owner = [FREE] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def total(self) -> int:
        return len(self._owner)

    @property
    def free(self) -> int:
        """Ids that nobody owns."""
        return len(self._free)

    def owner(self, page: int) -> int:
        return self._owner[page]

    def allocate(self, count: int, owner: int) -> list[int]:
        """Give count ids to owner. Raises ValueError when fewer are free: callers look at `free` first."""
        if owner == FREE:
            raise ValueError("FREE can own nothing")
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} pages asked, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owner[page] = owner
        return pages

    def transfer(self, page: int, owner: int, heir: int) -> None:
        """Pass a page from its owner to another one. Raises ValueError for a page owner does not have."""
        self._check(page, owner)
        if heir == FREE:
            raise ValueError("a page is freed with release()")
        self._owner[page] = heir

    def release(self, pages: list[int], owner: int) -> None:
        """Take pages back. Raises ValueError for a page owner does not have (a double free is one), taking none."""
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
