"""A request that is not answered: one sentence, with the status and the fields of OpenAI's errors."""

from __future__ import annotations

from typing import Any

from training.utils.base.errors import ThreestepError

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class RefusedRequest(ThreestepError):
    """A client's mistake, or a bound of the server. param: the field of the request. code: as OpenAI's clients read
    it."""

    def __init__(self, sentence: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        return error_body(str(self), self.status, self.param, self.code)


def error_body(sentence: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": sentence, "type": kind, "param": param, "code": code}}
