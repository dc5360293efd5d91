"""A prefill server of two stages and a decode server, with relays of ours on every connection between them."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import wait_until
from tests.e2e.models import NAME
from tests.faults.load import Texts
from tests.faults.relay import Relay
from tests.faults.servers import Place, Supervised

SIZES = "stub:layers=4,vocab=1000,max_len=8192"
PEER_TIMEOUT_S = 2.0
PREFILL_US = 200  # per token: a long prompt takes more than a second
DECODE_PLAN_US = 8000  # per pass of the decode server: a few hundred tokens take seconds
DEADLINES = (
    "--peer-timeout", f"{PEER_TIMEOUT_S:g}", "--transfer-timeout", "5", "--bootstrap-timeout", "12",
    "--stage-timeout", "8", "--drain-timeout", "10",
)  # fmt: skip
ROOM = ("--kv-pages", "1500", "--chunk-tokens", "256", "--threads", "1", "--served-model-name", NAME)
RELAYED = "127.0.0.2"  # where the decode server finds the prefill server
LINKS = ("http", "control", "data 0", "data 1")


class Pair:
    """Both servers, and the relays by the link that they are on."""

    def __init__(self, prefill: Supervised, decode: Supervised, relays: dict[str, Relay], texts: Texts) -> None:
        self.prefill, self.decode = prefill, decode
        self.relays = relays
        self.texts = texts
        self.rooms = 0

    @property
    def servers(self) -> tuple[Supervised, Supervised]:
        return self.prefill, self.decode

    @property
    def data(self) -> list[Relay]:
        """Relays of the connections that KV comes by."""
        return [relay for link, relay in self.relays.items() if link.startswith("data")]

    def router_fields(self) -> dict[str, Any]:
        """What a router adds to a body that it sends to both servers."""
        self.rooms += 1
        return {"bootstrap_host": RELAYED, "bootstrap_port": self.prefill.port, "bootstrap_room": 1000 + self.rooms}

    def clear(self) -> None:
        """Make the network good again."""
        for relay in self.relays.values():
            relay.clear()

    def settled(self) -> None:
        """Wait until both would serve."""
        for server in self.servers:
            wait_until(server.ready, 120, f"{server.name} server is ready\n{server.story}")


def prefill_flags(model: str, *more: str) -> tuple[str, ...]:
    return ("--role", "prefill", "--dtype", "float32", "--pp", "2", "--model", model, *ROOM, *DEADLINES, *more)


def decode_flags(model: str, prefill: str, *more: str) -> tuple[str, ...]:
    return ("--role", "decode", "--dtype", "float32", "--prefill", prefill, "--model", model, *ROOM, *DEADLINES, *more)


@contextmanager
def relayed_pair(
    prefill_more: tuple[str, ...] = (),
    decode_more: tuple[str, ...] = (),
    places: tuple[Place, Place] = (Place(), Place()),
    backends: str = "zmq",
) -> Iterator[Pair]:
    """The pair for the length of a with block. It ends by SIGTERM."""
    ports = _ports()
    http, control, data, _ = ports
    flags = ("--control-port", str(control), "--data-port", str(data), "--transfer-backends", backends)
    prefill_model, decode_model = (
        f"{SIZES},us_per_token={PREFILL_US}", f"{SIZES},us_per_token=20,us_per_plan={DECODE_PLAN_US}"
    )  # fmt: skip
    with ExitStack() as stack:
        relays = {}
        for link, port in zip(LINKS, ports, strict=True):
            relays[link] = stack.enter_context(closing(Relay((RELAYED, port), ("127.0.0.1", port))))
        prefill = Supervised("prefill", prefill_flags(prefill_model, *flags, *prefill_more), ports, places[0])
        stack.enter_context(closing(prefill))
        url = f"http://{RELAYED}:{http}"
        more = ("--transfer-backends", backends, *decode_more)
        decode = Supervised("decode", decode_flags(decode_model, url, *more), [free_port()], places[1])
        stack.enter_context(closing(decode))
        pair = Pair(prefill, decode, relays, Texts(SIZES))
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
