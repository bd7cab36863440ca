"""Rows in a file, and the account of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_flags import data_flags
from threestep.plugins.inspect.account import Account, Look, account_of
from threestep.plugins.inspect.characters import Characters


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Write rows to a JSON-lines file; returns its address."""

    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return f"jsonl:{tmp_path / name}"

    return write


@pytest.fixture
def look(tmp_path: Path, write_rows: Callable[..., str]) -> Callable[..., Account]:
    """The account of rows, without a tokenizer where none is given; further arguments are data flags."""

    def make(rows: Any, phases: Any = (1, 2, 3), tokenizer: Any = None, shown: int = 20, **given: Any) -> Account:
        most_rows = given.pop("most_rows", 1000)
        given.setdefault("data_path", [write_rows(rows)] if rows else None)
        asked = Look(phases, shown, most_rows, seed=1, **{key: given.pop(key) for key in ("unread",) if key in given})
        data = data_flags(**{"data_output_path": str(tmp_path / "cache"), **given})
        return account_of(data, asked, tokenizer or Characters(), "the style", has_ids=tokenizer is not None)

    return make
