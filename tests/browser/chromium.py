"""A headless Chromium, driven over the pipes of its DevTools protocol: no package is needed beside the browser."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 60.0
AT_3_AND_4 = """
import os, sys
read, write = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))  # where the protocol wants them, in no other's place
while read in (3, 4): read = os.dup(read)
while write in (3, 4): write = os.dup(write)
os.dup2(read, 3); os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str | None:
    """The browser's program; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page of the browser. Console messages and exceptions of the page are collected in problems."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._ids = 0
        self._session = ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and wait for its result."""
        self._ids += 1
        message = {"id": self._ids, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._ids:
            self._event(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Set the viewport, and the colour scheme that the user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, what: str, within_s: float = DEADLINE_S) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + within_s
        while not self.value(expression):
            assert time.monotonic() < deadline, f"not within {within_s} s: {what}\n{self.text('body')}"
            time.sleep(0.1)

    def text(self, selector: str) -> str:
        found = self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        assert isinstance(found, str)
        return found

    def screenshot(self, whole: bool = True) -> bytes:
        """A PNG of the page, or of what the viewport shows."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def _event(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"].get("exception", params)))
            case "Log.entryAdded":
                self.problems.append(f"{params['entry']['source']}: {params['entry']['text']}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def chromium(program: str) -> Iterator[Tab]:
    """A browser with a profile of its own, and a tab in it."""
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()

    # Processes of the browser may outlive the first one for a moment.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        pipes = [sys.executable, "-c", AT_3_AND_4, str(to_browser), str(to_us)]
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        quiet = ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"]
        browser = subprocess.Popen(
            [*pipes, program, *flags, *quiet, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, to_us),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(to_us)
        try:
            yield Tab(from_browser, from_us)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)  # its processes write to the profile
            browser.wait()
            os.close(from_browser)
            os.close(from_us)
