"""Small files and flags for the tests of the data room."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_flags import data_flags
from tests.support.data_forms import TEMPLATE
from tests.support.pair_rows import Own
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.base import user_files
from training.utils.data import registry
from training.utils.data.arguments import DataArguments
from training.utils.data.build.build import PhaseData, build_phase

ALONE: dict[Any, str] = {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}


def pair_rows(count: int) -> list[dict[str, str]]:
    """Rows of different lengths, no two alike."""
    return [
        {
            "prompt": f"Human: What is {i} + {i % 7}? Assistant:",
            "chosen": f" {i} + {i % 7} is {i + i % 7}." + " Sure." * (i % 3),
            "rejected": f" It is {i}.",
        }
        for i in range(count)
    ]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Write rows (objects, or lines as they are) to a JSON-lines file; returns its path."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def flags(tmp_path: Path, write_rows: Callable[..., str]) -> Callable[..., DataArguments]:
    """Data flags that read forty pairs, share them 2,4,4 and cache below tmp_path, with whatever is given instead."""

    def make(rows: list[Any] | None = None, **given: Any) -> DataArguments:
        if "data_path" not in given:
            given["data_path"] = [f"jsonl:{write_rows(pair_rows(40) if rows is None else rows)}"]
        return data_flags(**{"data_output_path": str(tmp_path / "cache"), "data_split": "2,4,4", **given})

    return make


@pytest.fixture
def build(flags: Callable[..., DataArguments], tiny_tokenizer: Any) -> Callable[..., PhaseData]:
    """Build a phase of all the rows given, none of them held out or left to other phases."""

    def make(phase: str | int, rows: list[Any] | None = None, tokenizer: Any = tiny_tokenizer, **given: Any) -> Any:
        log = given.pop("log", None)
        data = flags(rows, **{"data_split": ALONE.get(phase, "0,1,0"), "eval_fraction": 0.0, **given})
        return build_phase(phase, data, tokenizer, seed=1, log=log)

    return make


@pytest.fixture(scope="session")
def form_tokenizer() -> Any:
    """A tokenizer with the template of `tests.support.data_forms`."""
    made = train_tokenizer(SENTENCES)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Classes and modules that a test registers are forgotten after it."""
    registry.registered_names()
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(user_files, "_loaded", {})
    yield


@pytest.fixture
def own(own_registry, flags):
    """Register a subclass of Own with these rows and getters, and return the flags that name it, with the others."""

    def make(**members):
        given = {key: members.pop(key) for key in list(members) if not key.startswith("get_") and key != "rows"}
        registry.register_dataset("own")(type("Own", (Own,), members))
        return flags(data_path=["own"], **given)

    return make
