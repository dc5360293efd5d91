"""HTTP/1.1 from the network: uvicorn on llhttp, with an end to what is taken in besides bodies."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10  # of a request's head; a read may bring more at once
CHUNKING = 8  # bytes of chunk sizes and the like for a byte of a body


class HttpProtocol(HttpToolsProtocol):
    """The parser keeps heads, trailers and chunk extensions of any length, so whoever sends without end would fill the
    memory. Bodies are bounded where they are read (server/api/request/body.py)."""

    _taken = 0  # bytes of a request
    _body = 0  # of these, of its body

    def data_received(self, data: bytes) -> None:
        self._taken += len(data)
        super().data_received(data)
        if self._taken > HEAD_BYTES + (1 + CHUNKING) * self._body and not self.transport.is_closing():
            self.send_400_response(f"The request has more than {HEAD_BYTES} bytes besides its body.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._taken = self._body = 0

    def on_body(self, body: bytes) -> Any:
        self._body += len(body)
        return super().on_body(body)
