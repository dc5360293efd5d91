"""ZMQ without a protocol: pages as frames from one process into another's memory, for benchmarks.transfer.

The sockets, the frames, the copies and the window are those of transfer/; of headers and answers there are bytes alone.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

Pages = npt.NDArray[np.uint8]  # [pages, bytes of a page]
HEADER = bytes(200)


def send(pages: Pages, chunk_pages: int, window_bytes: int, repeats: int) -> None:
    """Print a port, then send all pages so many times for every line on standard input, until that ends."""
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
    """Takes frames in without a copy, and copies them into pages."""

    def __init__(self, port: int, pages: Pages) -> None:
        self._pages = pages
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.send(b"here")

    def take_all(self) -> None:
        """Until every page has come once."""
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
        self._context.destroy(linger=0)
