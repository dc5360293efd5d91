"""HTTP/1.1 for uvicorn on llhttp, with a limit on what a request may contain besides its body."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10  # limit of a request's head; checked after each read
CHUNKING = 8  # bytes of chunk framing allowed per byte of a body


class HttpProtocol(HttpToolsProtocol):
    """Rejects requests whose head, trailers and chunk framing are too long.

    The parser buffers these without a limit, so a client could exhaust the memory. Bodies are limited where they are
    read (server/api/request/body.py).
    """

    _received = 0  # bytes of the current request
    _body = 0  # of these, bytes of its body

    def data_received(self, data: bytes) -> None:
        """Parse, then respond with 400 if the request is over the limit."""
        self._received += len(data)
        super().data_received(data)
        if self._received > HEAD_BYTES + (1 + CHUNKING) * self._body and not self.transport.is_closing():
            self.send_400_response(f"The request has more than {HEAD_BYTES} bytes besides its body.")

    def on_message_begin(self) -> None:
        """Count anew for each request of the connection."""
        super().on_message_begin()
        self._received = self._body = 0

    def on_body(self, body: bytes) -> Any:
        """Count the bytes of the body."""
        self._body += len(body)
        return super().on_body(body)
