"""A small HTTP server in a thread, which stands for a reward model or a judge elsewhere: it answers by a function,
fails as often as it is told, and records what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], Any]


@dataclass
class ScoringServer:
    """answer: the body's JSON for a request's. fails: the status for the n-th request, 0 for an answer, -1 for a
    connection that is closed. silent: it never answers. drips: it sends a byte now and then."""

    answer: Answer
    fails: Callable[[int], int] = lambda number: 0
    silent: bool = False
    drips: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    _lock: Any = field(default_factory=threading.Lock)

    def take(self, body: dict[str, Any], headers: dict[str, str]) -> int:
        """Record a request, and return its status."""
        with self._lock:
            self.asked.append(body)
            self.headers.append(headers)
            return self.fails(len(self.asked) - 1)


class _Server(ThreadingHTTPServer):
    # Of 5, the library's own, the kernel resets some connections where 16 come while nobody accepts for two seconds:
    # the client has asked, the server never knew.
    request_queue_size = 128


@contextlib.contextmanager
def scoring_server(answer: Answer, **how: Any) -> Iterator[ScoringServer]:
    """A server on a free port of the loopback address."""
    state = ScoringServer(answer, **how)
    ending = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = state.take(body, {name.lower(): value for name, value in self.headers.items()})
            if state.silent:
                ending.wait(60)
                return
            if status == -1:
                self.close_connection = True
                return
            found = (
                state.answer(body)
                if not status
                else {"error": {"message": f"failed, {self.headers.get('Authorization')}"}}
            )
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status or 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if state.drips:
                while not ending.wait(0.05):
                    self.wfile.write(b" ")
                return
            if not status:  # counted before it is sent: who has the answer may look at once
                with state._lock:
                    state.answered.append(body)
            self.wfile.write(content)

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        ending.set()
        server.shutdown()
        server.server_close()
        thread.join()


def rewards_by_length(body: dict[str, Any]) -> dict[str, Any]:
    """A reward server's answer: a tenth for each character, which has no exact float."""
    return {"rewards": [len(response) / 10 for response in body["responses"]]}


def mostly_failing(number: int) -> int:
    """Three of ten requests fail, in three ways."""
    return {2: 500, 5: -1, 7: 429}.get(number % 10, 0)


def judged(verdict: Callable[[str], str], tokens: int | None = 12) -> Answer:
    """A chat endpoint's answer, whose text is `verdict` of the question."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": verdict(body["messages"][-1]["content"])}
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        return {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            **({} if tokens is None else {"usage": usage}),
        }

    return answer


def between(question: str, begin: str, end: str) -> str:
    """The part of a question between two of its lines."""
    return question.partition(f"{begin}\n")[2].partition(f"\n{end}")[0]


def rated_by_length(question: str) -> str:
    """A rating of 1 to 10 by the length of the answer, after words that mean nothing."""
    length = len(between(question, "[The answer]", "[The end of the answer]"))
    return f"It has [[{length % 3}]] parts.\n[[{1 + length % 10}]]"


def longer_wins(question: str) -> str:
    """A comparison by length, in which A wins a draw: such a judge prefers what stands first."""
    first, second = (
        len(between(question, f"[Answer {name}]", f"[The end of answer {name[-1]}]")) for name in ("A", "B")
    )
    return "[[A]]" if first >= second else "[[B]]"
