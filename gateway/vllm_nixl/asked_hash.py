"""Which compatibility hash the gateway answers a decode engine with, where engines of several releases of vLLM read
from it. Pure.

A query for the gateway's handshake does not say who asks, and an engine takes no answer but one with its own hash. What
is known of the asker is its address:

    one release at that address       that release's hash
    several, or none that is known    theirs, or all, one after the other: first that of the engine last heard of

An engine that gets another one's hash computes the prompt itself, and asks again for the next one. Engines of unlike
releases that share an address, behind a NAT or on one host, so need as many prompts as there are releases, and again
whenever the gateway's NIXL agent is replaced, if they are not the one that is in use.
"""

from collections.abc import Iterable, Mapping

MOST_ADDRESSES = 1024  # whose turns are kept


class AskedHash:
    """Chooses hashes. Used by one thread."""

    def __init__(self, hash_of_one: str) -> None:
        """hash_of_one: of an engine, until serve() says more."""
        self._by_address: Mapping[str, tuple[str, ...]] = {}
        self._all: tuple[str, ...] = (hash_of_one,)
        self._turns: dict[str, int] = {}  # queries that were answered in turn, by address
        self._of_agents: Mapping[str, str] = {}
        self._latest = ""  # hash of the engine that was heard of last

    def serve(self, engines: Iterable[tuple[Iterable[str], str, str]]) -> None:
        """The engines that are there: addresses, hash and NIXL agent of each. With none those before are kept."""
        by_address: dict[str, list[str]] = {}
        every: dict[str, None] = {}
        agents: dict[str, str] = {}
        for addresses, wanted, agent in engines:
            every[wanted] = None
            agents[agent] = wanted
            for address in addresses:
                known = by_address.setdefault(address, [])
                if wanted not in known:
                    known.append(wanted)
        if every:
            self._by_address = {address: tuple(known) for address, known in by_address.items()}
            self._all = tuple(every)
            self._of_agents = agents

    def heard(self, agent: str) -> None:
        """An engine has sent a notice. agent: its NIXL agent."""
        self._latest = self._of_agents.get(agent, self._latest)

    def begin_turns(self) -> None:
        """Every engine asks again: the gateway's NIXL agent is another one."""
        self._turns.clear()

    def of(self, address: str) -> str:
        """The hash for a query from an address, "" where it is not known."""
        among = self._by_address.get(address, self._all)
        if len(among) == 1:
            return among[0]
        turn = self._turns.get(address, 0)
        if len(self._turns) >= MOST_ADDRESSES:
            self._turns.clear()
        self._turns[address] = turn + 1
        first = among.index(self._latest) if self._latest in among else 0
        return among[(first + turn) % len(among)]
