"""A real prefill server that writes into the staging area of a peer on its machine, in vLLM's layout.

Its two stages have their layers each. Bytes are compared with those that come in frames.
"""

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from headrace.core.config import TransferConfig
from headrace.core.messages.frontend import AddPrefill, RemovePrefill
from headrace.core.messages.replies import PrefillState
from headrace.core.types.kv.backends import SHM, ZMQ, Backend
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.core.types.peers.allow_list import allowed_prefills
from headrace.gateway.vllm_nixl.kv_pool import vllm_layout
from headrace.peer.commands import (
    AnyResult,
    CancelLoad,
    LoadCancelled,
    Loaded,
    LoadFailed,
    LoadKv,
    ReleaseLoad,
    TicketRef,
)
from headrace.peer.records import PeerLimits
from headrace.peer.shared_staging import SharedStaging
from headrace.peer.thread import PeerThread
from headrace.transfer.backends.writer_locks import host_token
from headrace.transfer.protocol.layout import Bytes
from tests.e2e.harness import Server, pages_in_use, serving, wait_until

pytestmark = pytest.mark.skipif(not host_token(), reason="no shared memory here")

GEOMETRY = Geometry("float32", layers=4, kv_heads=2, head_dim=16, page_size=16)
MODEL = "stub:layers=4,hidden=128,heads=8,kv_heads=2,vocab=1000,max_len=4096,us_per_token=300"
SIZES = ("--pp", "2", "--page-size", "64", "--chunk-tokens", "256", "--kv-pages", "128")
FLAGS = ("--dtype", "float32", "--threads", "1", "--peer-timeout", "20", "--no-prefix-cache")
PROMPT = [number % 991 for number in range(2000)]
PAGES = ceil_div(len(PROMPT), 16)
URL = "http://prefill"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--role", "prefill", "--model", MODEL, *SIZES, *FLAGS) as made:
        yield made


class Owner:
    """A peer with room for one long prompt, in a standing session."""

    def __init__(self, server: Server, *backends: Backend) -> None:
        about = server.get("/v1/handoff").json()
        self.server, self.port = server, int(about["control_port"])
        self.staging = SharedStaging(GEOMETRY, vllm_layout(GEOMETRY, PAGES))
        limits = PeerLimits(
            fingerprint=about["fingerprint"],
            rules=allowed_prefills((), ()),
            pages=PAGES,
            page_tokens=GEOMETRY.page_size,
            connect_timeout_s=60.0,
        )
        transfer = TransferConfig(backends=backends, peer_timeout_s=20.0)
        self.peer = PeerThread(limits, self.staging, name="test", max_model_len=4096, transfer=transfer)
        self.peer.start()
        self.posts = ThreadPoolExecutor(4)
        self.peer.submit(AddPrefill(name=URL, endpoint=f"tcp://127.0.0.1:{self.port}"))
        assert self.peer.results(wait_s=60) == [PrefillState(name=URL, up=True)]
        self.states: list[PrefillState] = []  # from then on

    def result(self) -> AnyResult:
        """What becomes of the next load."""
        while True:
            for found in self.peer.results(wait_s=60):
                if not isinstance(found, PrefillState):
                    return found
                self.states.append(found)

    def load(self, ticket: str, prompt: list[int] = PROMPT) -> Future[int]:
        """Post a prompt and load its ticket, which is not waited for. Returns the status of the former."""
        body = {"prompt_token_ids": prompt, "ticket": ticket, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
        posted = self.posts.submit(lambda: self.server.post("/v1/prefill", body).status_code)
        place = TicketRef(name=ticket, host="127.0.0.1", port=self.port)
        self.peer.submit(LoadKv(id=ticket, ticket=place, start=0, tokens=len(prompt)))
        return posted

    def ask_for_nothing(self) -> None:
        """Load a ticket that there is not, which is refused as soon as there are pages for it: the server's scheduler
        goes on when a stage does not."""
        place = TicketRef(name="nothing", host="127.0.0.1", port=self.port, wait=False)
        self.peer.submit(LoadKv(id="nothing", ticket=place, start=0, tokens=1))

    def loaded(self, ticket: str, prompt: list[int] = PROMPT) -> list[Bytes]:
        """The KV of a prompt, page by page."""
        self.load(ticket, prompt)
        return self.taken(prompt)

    def taken(self, prompt: list[int] = PROMPT) -> list[Bytes]:
        loaded = self.result()
        assert isinstance(loaded, Loaded), loaded
        first, counts = loaded.at // 16, [min(16, len(prompt) - start) for start in range(0, len(prompt), 16)]
        kv = [self.staging.read(first + number, 0, count).copy() for number, count in enumerate(counts)]
        self.peer.submit(ReleaseLoad(id=loaded.id))
        return kv

    def half_written(self) -> bool:
        """Whether the stages write, and have not come to the last page."""
        return self.staging.read(0, 0, 16).any() and not self.staging.read(PAGES - 1, 0, 1).any()

    def close(self) -> None:
        self.peer.stop()
        self.posts.shutdown()
        self.staging.close()


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """A process whose threads are all stopped, which they are not yet when the signal is sent."""
    process.send_signal(signal.SIGSTOP)
    try:
        tasks = Path(f"/proc/{process.pid}/task")
        wait_until(lambda: {state_of(task) for task in tasks.iterdir()} == {"T"}, 10, "it is stopped")
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def state_of(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def stages(server: Server) -> list[psutil.Process]:
    return [child for child in server.children() if "headrace.engine.stage" in child.cmdline()]


def sent(server: Server, backend: str) -> float:
    return server.metrics().get(f'headrace_bytes_sent_total{{backend="{backend}"}}', 0.0)


def test_stages_write_the_bytes_that_frames_would_have_brought(server: Server) -> None:
    """Prompts of every alignment, of the peer's pages and of the server's, which are longer."""
    prompts = [PROMPT[:length] for length in (1, 15, 16, 17, 255, 256, 257, 2000)]
    with closing(Owner(server, SHM, ZMQ)) as shared, closing(Owner(server, ZMQ)) as framed:
        for number, prompt in enumerate(prompts):
            written, brought = (
                owner.loaded(f"{owner.port}-{id(owner)}-{number}", prompt) for owner in (shared, framed)
            )
            assert all(np.array_equal(one, other) for one, other in zip(written, brought, strict=True))
            assert all(page.any(axis=(0, 1, 2, 4)).all() for page in written), "every token has KV"
        size = sum(map(len, prompts)) * GEOMETRY.token_bytes
        wait_until(lambda: sent(server, SHM) == sent(server, ZMQ) == size, 10, f"as many bytes each way\n{server.log}")
        shared.peer.submit(RemovePrefill(name=URL))
        assert shared.peer.results(wait_s=60) == [PrefillState(name=URL, up=False, reason="disconnected")]
    wait_until(lambda: server.metrics()["headrace_control_sessions"] == 0, 10, "no session is left")


def test_a_stage_that_is_stopped_while_it_writes_keeps_its_pages_until_it_goes_on(server: Server) -> None:
    with closing(Owner(server, SHM)) as owner:
        expected = owner.loaded("expected", PROMPT[::-1])
        np.frombuffer(owner.staging.buffer, np.uint8)[:] = 0
        owner.load("struck")
        wait_until(owner.half_written, 20, "some of the KV is there")
        with stopped(stages(server)[0]):
            owner.peer.submit(CancelLoad(id="struck"))
            assert owner.result() == LoadCancelled(id="struck"), "at once"
            owner.ask_for_nothing()
            assert owner.peer.results(wait_s=1.0) == [], "all pages are those that may be written"
            assert owner.peer.stopping_pages == PAGES
        refused = owner.result()
        assert isinstance(refused, LoadFailed)
        assert refused.code == "unknown_ticket"
        pages = owner.loaded("next", PROMPT[::-1])
        assert all(np.array_equal(one, other) for one, other in zip(pages, expected, strict=True))
    wait_until(lambda: pages_in_use(server) == 0, 10, f"pages back\n{server.log}")


def test_a_stage_that_is_killed_while_it_writes_gives_up_its_pages(server: Server) -> None:
    """Last: its server has other stages to start then."""
    with closing(Owner(server, SHM)) as owner:
        owner.load("killed")
        wait_until(owner.half_written, 20, "some of the KV is there")
        victim = stages(server)[1]
        with stopped(victim):
            owner.peer.submit(CancelLoad(id="killed"))
            assert owner.result() == LoadCancelled(id="killed")
            owner.ask_for_nothing()
            assert owner.peer.results(wait_s=0.5) == []
            victim.kill()
        refused = owner.result()
        assert isinstance(refused, LoadFailed)
        assert refused.code in ("unknown_ticket", "not_ready"), "its pages are free, and it has a session"
        assert [state.up for state in owner.states] == [False, True]
