"""The HTTP server of an SGLang decode engine, as far as a gateway asks it: GET /server_info."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INFO = {
    "version": "0.5.23",
    "page_size": 16,
    "dtype": "float32",
    "kv_cache_dtype": "auto",
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "nixl",
    "pp_size": 1,
    "speculative_algorithm": None,
    "internal_states": [{}],
    "served_model_name": "/models/tested",
}
"""Some of its fields."""


class InfoServer:
    """Runs from start to close(). Status and fields are attributes, which tests change; API keys that were sent are
    kept."""

    def __init__(self) -> None:
        self.status, self.info, self.keys = 200, dict(INFO), list[str | None]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.keys.append(self.headers["Authorization"])
                body: Any = server.info if self.path == "/server_info" else {}
                self.send_response(server.status if self.path == "/server_info" else 404)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
