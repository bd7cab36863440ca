"""Messages of a conversation, as a row holds them."""

from __future__ import annotations

from typing import Any


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def user(content: Any = "a", **more: Any) -> dict[str, Any]:
    return says("user", content, **more)


def assistant(content: Any = "b", **more: Any) -> dict[str, Any]:
    return says("assistant", content, **more)
