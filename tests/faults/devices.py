"""Device errors: prompts that make a stage of the stub model run out of memory, or hang (engine/stub/runner.py)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tests.faults.cells import Strike
from tests.faults.load import TIMEOUT_S, Ended, ask, body_of
from tests.faults.pair import FAULT_TOKEN, Pair

Kind = Literal["memory", "hang"]
NO_TRANSFER = {"bootstrap_host": "2.2.2.2", "bootstrap_port": 1, "bootstrap_room": 1}  # the decode server computes it


def broken(server: str, kind: Kind, last: bool) -> Strike:
    """A prompt comes that breaks the first or the last stage of a server. It has to fail with a typed error."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        second = FAULT_TOKEN + 2 * (kind == "hang") + last
        body = body_of([FAULT_TOKEN, second, 1, 2, 3], 4, **(NO_TRANSFER if server == "decode" else {}))
        ends: list[Ended] = []
        client = threading.Thread(target=lambda: ends.append(ask(pair.decode.url, body, "no text at all")))
        client.start()
        yield
        client.join(TIMEOUT_S + 10)
        assert [end.outcome[:2] for end in ends] == ["50"], ends

    return strike
