"""Limit for benchmarks.transfer: NIXL alone, the pages of one process written into another's.

Descriptors, transports and the window are those of headrace.transfer; there are no headers and no answers.
"""

import sys
import time

import numpy as np
from nixl import _bindings as nixl

from headrace.core.types.kv.backends import NixlAccess
from headrace.transfer.backends.nixl import LOOPBACK, Agent

POLL_S = 0.0005


def send(
    memory: memoryview, access: NixlAccess, page_bytes: int, chunk_pages: int, window_bytes: int, repeats: int
) -> None:
    """Print a line when set up. Then for every line on standard input: write all pages `repeats` times and print a
    line.

    memory: pages of page_bytes each. window_bytes: bytes under way at a time.
    """
    agent = Agent(memory, LOOPBACK)
    peer = agent.nixl.loadRemoteMD(access.metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    pages, most = len(memory) // page_bytes, max(1, window_bytes // (chunk_pages * page_bytes))
    print(0, flush=True)
    while sys.stdin.readline():
        posted: list[int] = []
        for first in list(range(0, pages, chunk_pages)) * repeats:
            while len(posted) >= most:
                posted = _wait(agent, posted)
            posted.append(_post(agent, peer, access, page_bytes, range(first, min(first + chunk_pages, pages))))
        while posted:
            posted = _wait(agent, posted)
        print(flush=True)


def _post(agent: Agent, peer: str, access: NixlAccess, page_bytes: int, pages: range) -> int:
    offsets = np.array(pages) * page_bytes
    sides = (
        np.stack([start + offsets, np.full_like(offsets, page_bytes), np.zeros_like(offsets)], axis=1)
        for start in (agent.address, access.address)
    )
    here, there = (nixl.nixlXferDList(nixl.DRAM_SEG, side.astype(np.uint64)) for side in sides)
    request = int(agent.nixl.createXferReq(nixl.NIXL_WRITE, here, there, peer))
    agent.nixl.postXferReq(request)
    return request


def _wait(agent: Agent, posted: list[int]) -> list[int]:
    """The requests still under way; sleeps POLL_S when none has finished."""
    left = [request for request in posted if agent.nixl.getXferStatus(request) == nixl.NIXL_IN_PROG]
    for request in set(posted) - set(left):
        agent.nixl.releaseXferReq(request)
    if len(left) == len(posted):
        time.sleep(POLL_S)
    return left
