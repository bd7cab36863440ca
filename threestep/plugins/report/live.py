"""A live page of runs: served to this machine alone, it shows what the runs append without being loaded again.

    GET /                the page, and the version of what is on it
    GET /update?have=N   the parts and charts that changed after version N, as JSON; 204 where none did

Both are answered to whoever has the token of the printed address (`serving.access`), and to nobody else.

The files are looked at when a page asks, at most every `_LOOK_SECONDS`, and for at most a tenth of the time, however
long the runs are; only what was appended is read. A curve is thinned, so an answer's size does not grow with the run.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from threestep.plugins.report.figures.reading import RunReader
from threestep.plugins.report.pages.page import page, parts_of
from threestep.plugins.serving.access import SAFE_HEADERS, Door
from threestep.plugins.serving.threaded import BoundedHandler, BoundedServer
from training.utils.base.errors import ThreestepError

# The page allows its scripts alone, by their digests (`document.policy`); a frame is refused by a header alone.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PLAIN = "text/plain; charset=utf-8"
_LOOK_SECONDS = 2.0
_SHARE = 0.1  # of the time, at most, is spent on reading and drawing


class LivePage:
    """The runs' page and its changes. Thread-safe. clock: seconds, monotonic."""

    def __init__(self, folders: Sequence[str | Path], clock: Any = time.monotonic) -> None:
        self._reader = RunReader(folders)
        self._clock = clock
        self._lock = threading.Lock()
        self._version, self._next_look = 0, 0.0
        self._sections: tuple[tuple[str, str], ...] = ()
        self._new_sections_at = 0
        self._seen: dict[tuple[str, str], tuple[str, int, Any]] = {}  # (kind, name): its JSON, its version, itself
        with self._lock:
            self._look()

    def whole(self) -> str:
        """The page as it is now."""
        with self._lock:
            runs = self._reader.read()
            live = {"version": self._version, "seconds": _LOOK_SECONDS}
            return page(runs, datetime.datetime.now(), live)

    def update(self, have: int) -> dict[str, Any] | None:
        """Changes since version `have`; None if there are none. reload: the sections differ."""
        with self._lock:
            self._look()
            if have == self._version:
                return None
            changed: dict[str, dict[str, Any]] = {"parts": {}, "charts": {}}
            for (kind, name), (_, version, value) in self._seen.items():
                if version > have:
                    changed[kind][name] = value
            # A version of an earlier program is not one of ours.
            stale = have > self._version or have < self._new_sections_at
            return {"version": self._version, "reload": stale, **({"parts": {}, "charts": {}} if stale else changed)}

    def _look(self) -> None:
        started = self._clock()
        if started < self._next_look:
            return
        parts = parts_of(self._reader.read())
        now = {("parts", name): html for name, html in parts.html.items()} | {
            ("charts", name): drawing for name, drawing in parts.drawings.items()
        }
        texts = {key: json.dumps(value) for key, value in now.items()}
        same_kinds = parts.sections == self._sections and now.keys() == self._seen.keys()
        if not same_kinds or any(self._seen[key][0] != text for key, text in texts.items()):
            self._version += 1
        if not same_kinds:
            self._new_sections_at, self._sections = self._version, parts.sections
        before = self._seen
        self._seen = {
            key: before[key] if key in before and before[key][0] == text else (text, self._version, now[key])
            for key, text in texts.items()
        }
        spent = self._clock() - started
        self._next_look = started + spent + max(_LOOK_SECONDS * 0.9, spent / _SHARE)


def serve_live(folders: Sequence[str | Path], port: int, announce: Any) -> None:
    """Serve the page until Ctrl-C. announce: called with the page's address. ThreestepError if a folder holds no run,
    or the port is taken."""
    door = Door()
    server = make_server(LivePage(folders), port, door)
    announce(f"{door.address(server.server_address[1])} (Ctrl-C ends)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def make_server(live: LivePage, port: int, door: Door) -> BoundedServer:
    """A server of the page on the loopback address; port 0 takes a free one. door: its access control."""

    class Handler(BoundedHandler):
        def do_GET(self) -> None:
            refusal = door.judge(self.command, self.path, self.headers.items())
            if refusal is None and self.server.let_in(self.connection):
                return self._answer(*answer_to(live, self.path), (("Content-Security-Policy", _POLICY),))
            if refusal is not None:
                self._answer(refusal.status, _PLAIN, refusal.text, refusal.headers)

        def _answer(self, status: int, kind: str, text: str, headers: Sequence[tuple[str, str]]) -> None:
            body = text.encode("utf-8", "replace")
            self.send_response(status)
            sent = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
            for name, value in {**sent, **dict(SAFE_HEADERS), **dict(headers)}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    try:
        return BoundedServer(port, Handler)
    except OSError as problem:
        raise ThreestepError(
            f"--port {port}: {problem.strerror}; choose another port, or 0 for a free one"
        ) from problem


def answer_to(live: LivePage, path: str) -> tuple[int, str, str]:
    """(status, content type, body) of a GET request that was let in."""
    parts = urlsplit(path)
    try:
        if parts.path == "/":
            return 200, "text/html; charset=utf-8", live.whole()
        if parts.path == "/update":
            have = parse_qs(parts.query).get("have", [""])[0]
            update = live.update(int(have)) if have.isascii() and have.isdigit() and len(have) < 12 else None
            return (204, _PLAIN, "") if update is None else (200, "application/json", json.dumps(update))
    except ThreestepError as problem:  # the folder is gone
        return 503, _PLAIN, f"{problem}\n"
    return 404, _PLAIN, "this server has only / and /update\n"
