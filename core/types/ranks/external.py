"""External data parallelism: servers with a scheduler each whose ranks share experts. Which of them a server is."""

import re

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.addresses import host_port

_FORM = re.compile(r"(\d+)/(\d+)@(.+):(\d+)")
MAX_PORT = 65535
EXAMPLE = "write RANK/SIZE@HOST:PORT, such as 0/2@10.0.0.5:9000, with ranks from 0 and the address of server 0"


class ExternalMember(msgspec.Struct, frozen=True):
    """One server of a group."""

    rank: int
    """Its number, from 0: the data-parallel replica that it is."""
    size: int
    """Servers in the group."""
    host: str
    """Host of server 0, whose first rank serves the store where all meet."""
    port: int
    """Port of the store."""

    @property
    def address(self) -> str:
        """HOST:PORT of the store."""
        return host_port(self.host, self.port)

    @property
    def lost(self) -> str:
        """What a broken link to another server of the group says, for messages."""
        others = [str(rank) for rank in range(self.size) if rank != self.rank]
        named = f"server {others[0]}" if len(others) == 1 else f"one of the servers {', '.join(others)}"
        return (
            f"{named} of --dp-external {self}, with which this one shares experts, has ended, has lost a rank or "
            "cannot be reached"
        )

    def __str__(self) -> str:
        return f"{self.rank}/{self.size}@{self.address}"


def parse_member(text: str) -> ExternalMember:
    """The member that RANK/SIZE@HOST:PORT describes. Raises ConfigError."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(f"--dp-external {text}: {EXAMPLE}")
    rank, size, host, port = int(found[1]), int(found[2]), found[3].strip("[]"), int(found[4])
    if size < 2:
        raise ConfigError(f"--dp-external {text}: a group has 2 servers or more; leave it out for a single one")
    if rank >= size:
        raise ConfigError(f"--dp-external {text}: the servers of a group of {size} are 0 to {size - 1}")
    if not host or not 0 < port <= MAX_PORT:
        raise ConfigError(f"--dp-external {text}: {EXAMPLE}")
    return ExternalMember(rank, size, host, port)
