"""A prefill stage in a process of its own, and a decode stage here, with NIXL between them.

Pages that were given back are poisoned; whatever is written into them later is found.
"""

import time
from pathlib import Path
from typing import Any

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import AdmitPeer, OpenSession, PrepareReceive, SendChunk
from headrace.core.types.kv.backends import NIXL, NixlMemory, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms, PrefillTerms
from headrace.transfer.backends.strided_pool import ArrayPageStore, c_order
from headrace.transfer.data.receiver import Receiver
from tests.transfer.harness import FIRST, Loop, random_store
from tests.transfer.nixl_stage import Process, Setup

BIG = Geometry("float16", layers=8, kv_heads=4, head_dim=64, page_size=32)  # 256 KiB a page
PAGES = 400
POISON = 0xEE
CONFIG = TransferConfig(backends=(NIXL,), window_bytes=1 << 30)


class Handoff:
    """A prefill stage in another process, and a decode stage here."""

    def __init__(
        self,
        context: Any,
        source: Geometry,
        destination: Geometry,
        pages: int = PAGES,
        config: TransferConfig = CONFIG,
    ) -> None:
        from headrace.transfer.backends.nixl import LOOPBACK, NixlRegisteredPool

        self.source, self.destination = source, destination
        self.store = random_store(source, pages, seed=1)  # the twin of what the other process has
        self.target = random_store(destination, pages, seed=2)
        self.registered = NixlRegisteredPool(c_order(destination, pages), memoryview(self.target.memory), LOOPBACK)
        self.receiver = Receiver(
            config,
            stage=0,
            geometry=destination,
            store=self.target,
            context=context,
            registered_pools={NIXL: self.registered},
        )
        self.loop = Loop(self.receiver)
        self.stage = Process("stage", Setup(source, pages, config), self.loop)
        self.processes = [self.stage]

    def join(self, session: str) -> None:
        """Begin a session with the decode stage that is here."""
        self.admit(session, self.destination, self.registered.memory)
        self.loop.apply(self.receiver, self.open_session(session))

    def admit(self, session: str, geometry: Geometry, memory: NixlMemory) -> None:
        self.stage.order(
            AdmitPeer(
                seq=0,
                terms=PeerTerms(
                    session=session,
                    geometries=(geometry,),
                    window_bytes=CONFIG.window_bytes,
                    backend=NIXL,
                    memory=(PoolMemory(nixl=memory),),
                ),
            )
        )

    def open_session(self, session: str) -> OpenSession:
        return OpenSession(
            seq=0,
            terms=PrefillTerms(
                session=session,
                endpoints=(f"tcp://127.0.0.1:{self.stage.hello['port']}",),
                geometries=(self.source,),
                window_bytes=CONFIG.window_bytes,
                backend=NIXL,
            ),
        )

    def expect(self, request: int, session: str, pages: Any, start: int, count: int) -> PrepareReceive:
        return PrepareReceive(
            seq=0,
            request=request,
            session=session,
            ticket=f"ticket-{request}",
            generation=1,
            start=start,
            count=count,
            pages=pack(pages),
            row=request,
        )

    def send(self, request: int, session: str, pages: Any, dst_pages: Any, start: int, count: int) -> None:
        """All in one chunk."""
        self.stage.order(
            SendChunk(
                after=0,
                seq=0,
                request=request,
                session=session,
                ticket=f"ticket-{request}",
                generation=1,
                chunk=0,
                start=start,
                count=count,
                pages=pack(pages),
                dst_pages=pack(dst_pages),
                row=0,
                dst_row=request,
                last=FIRST,
            )
        )

    def fetch(self, request: int, session: str, pages: Any, dst_pages: Any, start: int, count: int) -> None:
        self.loop.apply(self.receiver, self.expect(request, session, dst_pages, start, count))
        self.send(request, session, pages, dst_pages, start, count)

    def stage_elsewhere(self, folder: Path) -> Process:
        """A decode stage in a process of its own. It is its pool that is looked at from now on."""
        file = folder / "pool"
        file.write_bytes(bytes(self.target.memory))
        setup = Setup(self.destination, PAGES, CONFIG, str(file))
        peer = Process("peer", setup, self.loop)
        self.processes.append(peer)
        self.target = ArrayPageStore(self.destination, PAGES, setup.mapped())
        return peer

    def join_elsewhere(self, peer: Process, session: str) -> None:
        self.admit(session, self.destination, NixlMemory(**peer.hello["memory"]))
        peer.order(self.open_session(session))

    def fetch_elsewhere(self, peer: Process, request: int, session: str, pages: range) -> None:
        """The same pages there as here."""
        start, count = 0, len(pages) * self.source.page_size
        peer.order(self.expect(request, session, pages, start, count))
        self.send(request, session, pages, pages, start, count)

    def flood(self, request: int, session: str) -> None:
        """Have every page of the big pools written, and come back in the middle of it."""
        self.target.data[:] = POISON
        self.fetch(request, session, range(PAGES), range(PAGES), 0, PAGES * BIG.page_size)
        self.loop.until(lambda: self.written() > 0.02, 20.0)

    def written(self) -> float:
        """The share of pages whose write has begun."""
        return float((self.target.data.reshape(PAGES, -1)[:, ::4096] != POISON).any(axis=1).mean())

    def stays_poisoned(self, seconds: float = 0.5) -> bool:
        self.target.data[:] = POISON
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.loop.turn()
        return bool((self.target.data == POISON).all())

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.loop.close()
        self.registered.close()
