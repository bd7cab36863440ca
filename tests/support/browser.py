"""A headless Chromium that opens pages and answers questions about them, by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The program, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. problems: what it wrote to its console as an error, and what its scripts raised."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb", buffering=0), os.fdopen(back, "rb", buffering=0)
        self._buffer, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """The answer to one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        message |= {"sessionId": self._session} if self._session else {}
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.problems.append(answer["params"]["entry"]["text"])

    def show(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page on a screen of this size, and wait until it is there."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href !== 'about:blank' && innerWidth === {width}")

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Until the expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"still not: {expression}"
            time.sleep(0.05)

    def press(self, x: float, y: float, to: float | None = None) -> None:
        """Press the mouse at a place of the screen, and drag it to another x."""
        moves = [("mouseMoved", x), ("mousePressed", x)] + ([("mouseMoved", to)] if to is not None else [])
        for kind, at in [*moves, ("mouseReleased", x if to is None else to)]:
            button = "none" if (kind, at) == ("mouseMoved", x) else "left"
            self.ask("Input.dispatchMouseEvent", type=kind, x=at, y=y, button=button, clickCount=1)

    def picture(self) -> bytes:
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = self._back.read(2**16)
            assert read, "the browser has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        self._to.close()
        self._back.close()


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """A browser with a profile of its own, ended with its processes."""
    program = chromium()
    assert program is not None
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile}"
        command = f'exec "$0" {flags} about:blank 3<&{to_read} 4>&{back_write}'
        process = subprocess.Popen(
            ["bash", "-c", command, program], pass_fds=(to_read, back_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read), os.close(back_write)
        browser = Browser(to_write, back_read)
        try:
            yield browser
        finally:
            browser.close()  # Chromium ends with its pipes
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
