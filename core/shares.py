"""Who has how much of something that is limited, and whether one of them may have more. Pure.

One owner may have all of it while there is no other. Once there are others, none of them is kept out by it:

    an equal share        what can exceed its limit for a while (places in a queue) is given beyond the limit to an
                          owner that stays within limit / owners: n owners have limit * (1 + 1/2 + … + 1/n) at most
    as much as is left    what cannot (pages) is given to an owner with less than what is left: n owners leave a share
                          of 1 / (n + 1) to those that come. Choudhury, Hahne: "Dynamic queue length thresholds for
                          shared-memory packet switches", IEEE/ACM Transactions on Networking 6 (2), 1998
"""


class Shares:
    """Amounts by owner. An owner without any is not counted."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self.total = 0
        """The amounts of all owners."""

    def used(self, owner: str) -> int:
        """What an owner has."""
        return self._used.get(owner, 0)

    def add(self, owner: str, amount: int) -> None:
        """An owner has so much more; less if it is negative."""
        self.total += amount
        used = self._used.get(owner, 0) + amount
        if used:
            self._used[owner] = used
        else:
            self._used.pop(owner, None)

    def admits(self, owner: str, more: int, limit: int) -> bool:
        """So much more keeps all owners within the limit, or else this one within its equal share of it."""
        return self.total + more <= limit or self.within_equal_share(owner, more, limit)

    def within_equal_share(self, owner: str, more: int, limit: int) -> bool:
        """With so much more, the owner has no more than an equal share of the limit. An owner without anything may
        always have it; one that is alone has no share, but the limit."""
        used = self.used(owner)
        others = len(self._used) - (used > 0)
        if not others:
            return False
        return not used or used + more <= limit // (others + 1)

    def leaves_as_much(self, owner: str, more: int, limit: int) -> bool:
        """With so much more, the owner has no more than what is left of the limit now. An owner without anything may
        always have it."""
        used = self.used(owner)
        return not used or used + more <= limit - self.total
