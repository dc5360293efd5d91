"""A prefill server of two stages and a decode server, with relays of ours on every connection between them."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Protocol

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import wait_until
from tests.e2e.models import NAME
from tests.faults.load import Texts
from tests.faults.relay import Relay
from tests.faults.servers import Place, Supervised

SIZES = "stub:layers=4,vocab=1000,max_len=8192"
FAULT_TOKEN = 990  # see engine/stub/runner.py
# A long prompt takes more than a second, a few hundred tokens take seconds.
PREFILL_MODEL = f"{SIZES},us_per_token=200,fault_token={FAULT_TOKEN}"
DECODE_MODEL = f"{SIZES},us_per_token=20,us_per_plan=8000,fault_token={FAULT_TOKEN}"
PAGES = 1500
PEER_TIMEOUT_S = 2.0
DEADLINES = (
    "--peer-timeout", f"{PEER_TIMEOUT_S:g}", "--transfer-timeout", "5", "--bootstrap-timeout", "8",
    "--stage-timeout", "8", "--drain-timeout", "10",
)  # fmt: skip
COMMON = ("--kv-pages", f"{PAGES}", "--chunk-tokens", "256", "--threads", "1", "--served-model-name", NAME)
RELAYED = "127.0.0.2"  # where the decode server finds the prefill server
LINKS = ("http", "control", "data 0", "data 1")


class Network(Protocol):
    """What is between the two servers."""

    def slow(self, bytes_per_s: float) -> None:
        """Bound the rate of KV."""


class Relays:
    """A relay on every connection, by its link."""

    def __init__(self, relays: dict[str, Relay]) -> None:
        self._relays = relays

    def slow(self, bytes_per_s: float) -> None:
        data = [relay for link, relay in self._relays.items() if link.startswith("data")]
        for relay in data:
            relay.down.bytes_per_s = bytes_per_s / len(data)


class Pair:
    """Both servers. relays: by the link that they are on; none where another network is between the servers.
    address: of the prefill server for the decode server."""

    def __init__(
        self,
        prefill: Supervised,
        decode: Supervised,
        relays: dict[str, Relay],
        texts: Texts,
        network: Network,
        address: str = RELAYED,
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.relays = relays
        self.texts = texts
        self.network = network
        self.address = address
        self.uncounted = 0
        """Requests whose ends no client has read: they may have ended well."""
        self._rooms = 1000

    @property
    def servers(self) -> tuple[Supervised, Supervised]:
        return self.prefill, self.decode

    def router_fields(self) -> dict[str, Any]:
        """What a router adds to a body that it sends to both servers."""
        self._rooms += 1
        return {"bootstrap_host": self.address, "bootstrap_port": self.prefill.port, "bootstrap_room": self._rooms}

    def clear(self) -> None:
        """Make the network good again."""
        for relay in self.relays.values():
            relay.clear()
        if not self.relays:
            self.network.slow(0.0)

    def settled(self) -> None:
        """Wait until both would serve."""
        for server in self.servers:
            wait_until(server.ready, 120, f"{server.name} server is ready\n{server.story}")


def prefill_flags(model: str, *more: str) -> tuple[str, ...]:
    return ("--role", "prefill", "--dtype", "float32", "--pp", "2", "--model", model, *COMMON, *DEADLINES, *more)


def decode_flags(model: str, prefill: str, *more: str) -> tuple[str, ...]:
    own = ("--role", "decode", "--dtype", "float32", "--prefill", prefill, "--model", model)
    return (*own, *COMMON, *DEADLINES, *more)


@contextmanager
def relayed_pair(
    prefill_more: tuple[str, ...] = (),
    decode_more: tuple[str, ...] = (),
    places: tuple[Place, Place] = (Place(), Place()),
    backends: str = "zmq",
) -> Iterator[Pair]:
    """The pair for the length of a with block."""
    ports = _ports()
    http, control, data, _ = ports
    flags = ("--control-port", str(control), "--data-port", str(data), "--transfer-backends", backends)
    with ExitStack() as stack:
        relays = {}
        for link, port in zip(LINKS, ports, strict=True):
            relays[link] = stack.enter_context(closing(Relay((RELAYED, port), ("127.0.0.1", port))))
        prefill = Supervised("prefill", prefill_flags(PREFILL_MODEL, *flags, *prefill_more), ports, places[0])
        stack.enter_context(closing(prefill))
        url = f"http://{RELAYED}:{http}"
        more = ("--transfer-backends", backends, *decode_more)
        decode = Supervised("decode", decode_flags(DECODE_MODEL, url, *more), [free_port()], places[1])
        stack.enter_context(closing(decode))
        pair = Pair(prefill, decode, relays, Texts(SIZES), Relays(relays))
        try:
            pair.settled()
            yield pair
        finally:
            print(prefill.story, decode.story, sep="\n=== decode server ===\n")


def _ports() -> list[int]:
    """Of HTTP, the control endpoint and two data sockets, which are neighbours."""
    while True:
        first = free_port()
        try:
            with closing(Relay(("127.0.0.1", first + 1), ("127.0.0.1", 1))):
                return [free_port(), free_port(), first, first + 1]
        except AssertionError:
            continue
