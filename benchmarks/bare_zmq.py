"""Limit for benchmarks.transfer: ZMQ alone, pages as frames from one process into another's memory.

Sockets, frames, copies and the window are those of headrace.transfer; headers and answers are dummy bytes.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

Pages = npt.NDArray[np.uint8]  # [pages, bytes of a page]
HEADER = bytes(200)  # about the size of a chunk's header


def send(pages: Pages, chunk_pages: int, window_bytes: int, repeats: int) -> None:
    """Print the port. Then send all pages `repeats` times for every line on standard input, until it ends.

    pages: uint8 [pages, page bytes]. window_bytes: unacknowledged bytes at a time.
    """
    context: Any = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    peer, _ = socket.recv_multipart()
    while sys.stdin.readline():
        unanswered = 0
        for first in list(range(0, len(pages), chunk_pages)) * repeats:
            chunk = pages[first : first + chunk_pages]
            while unanswered and unanswered + chunk.nbytes > window_bytes:
                unanswered -= int(socket.recv_multipart()[1])
            socket.send(peer, zmq.SNDMORE)
            socket.send(HEADER, zmq.SNDMORE)
            for index, page in enumerate(chunk):
                more = zmq.SNDMORE if index + 1 < len(chunk) else 0
                socket.send(page, more, copy=False, track=True)
            unanswered += chunk.nbytes
        while unanswered:
            unanswered -= int(socket.recv_multipart()[1])


class BareReceiver:
    """Receives frames without a copy, and copies them into pages."""

    def __init__(self, port: int, pages: Pages) -> None:
        """Connect to the sender at this loopback port. pages: uint8 [pages, page bytes], to be filled."""
        self._pages = pages
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.send(b"here")

    def take_all(self) -> None:
        """Receive every page once."""
        page = 0
        while page < len(self._pages):
            _, *frames = self._socket.recv_multipart(copy=False)
            size = 0
            for frame in frames:
                self._pages[page] = np.frombuffer(frame.buffer, np.uint8)
                page += 1
                size += len(frame)
            self._socket.send(str(size).encode())

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)
