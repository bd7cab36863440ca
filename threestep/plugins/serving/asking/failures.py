"""Requests that fail: whether another would do better, and how long to wait for it."""

from __future__ import annotations

from training.utils.base.credentials import hidden_left_out

LONGEST_PAUSE_SECONDS = 8.0
_FAULT_CHARACTERS = 200


class FailedRequest(Exception):
    """A request without an answer that can be read. is_final: no other request would do better. after: the seconds that
    the service wants to be left alone. tokens: that it charged all the same."""

    def __init__(self, reason: str, is_final: bool = False, after: float | None = None, tokens: int = 0) -> None:
        super().__init__(reason)
        self.is_final, self.after, self.tokens = is_final, after, tokens


def not_within(seconds: float) -> FailedRequest:
    """The failure of a request that takes too long, whoever notices first: who waits for it, or its socket."""
    return FailedRequest(f"no answer within {seconds:g} seconds")


def cut_fault(text: str) -> str:
    """A service's words about a failure, on one line and cut; without keys, of which a cut would leave a part."""
    return " ".join(hidden_left_out(text).split())[:_FAULT_CHARACTERS]
