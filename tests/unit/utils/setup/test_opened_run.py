"""What a run of any step leaves at its end, and in what order it is made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.engine.ranks.startup import Ranks
from training.utils.run.run_folder import RunFolder
from training.utils.setup import opened_run
from training.utils.setup.flags import RunFlags
from training.utils.setup.opened_run import OpenedRun, start_digests


class Noted:
    """Engines of a run, its average and its guests: each notes what is asked of it."""

    def __init__(self, *engines: str) -> None:
        self.events: list[str] = []
        self.engines: Any = {name: self.engine(name) for name in engines}

    def engine(self, name: str) -> Any:
        def full_state(model: Any) -> str:
            self.events.append(f"weights of {model}")
            return name

        return SimpleNamespace(module=SimpleNamespace(model=f"{name} model"), full_state=full_state)

    def put_in_place(self) -> None:
        self.events.append("average in place")

    def model_writer(self) -> None:
        self.events.append("guests")


def finished(
    noted: Noted,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    average: bool = False,
    trains: bool = True,
    **tokenizers: str,
) -> list[str]:
    """The events of a run's end, with the folders that are written."""

    def save_model(place: Path, model: Any, tensors: Any, tokenizer: Any, write_more: Any) -> None:
        noted.events.append(f"{place.name}: {model}, {tensors}, {tokenizer}")

    monkeypatch.setattr(opened_run, "save_model", save_model)
    monkeypatch.setattr(opened_run, "close_run", lambda *given: noted.events.append(f"closed {given[2]}"))
    ranks: Any = Ranks(0, 0, 1, None)  # type: ignore[arg-type]
    whole: Any = noted
    parts = CheckpointParts(noted.engines, ranks, whole if average else None, tokenizers)
    nothing: Any = None
    flags = RunFlags(nothing, nothing, CheckpointArguments(), nothing, nothing, {}, trains)
    run = OpenedRun(flags, ranks, nothing, RunFolder(str(folder), True), nothing, "fp32")
    run.finish(parts, whole, {"summary.json": {"seconds": 1.0}}, "the end")
    return noted.events


def test_the_first_model_has_its_guests_and_the_average_comes_last(tmp_path, monkeypatch, capsys):
    noted = Noted("actor", "critic", "mtp")
    assert finished(noted, tmp_path, monkeypatch, average=True, actor="words", critic="scores") == [
        "weights of actor model", "guests", "model: actor model, actor, words",
        "weights of critic model", "critic: critic model, critic, scores",
        "average in place", "weights of actor model", "model_ema: actor model, actor, words",
        "closed True",
    ]  # fmt: skip
    assert capsys.readouterr().out == "the end\n" and (tmp_path / "summary.json").is_file()


def test_one_model_is_called_model(tmp_path, monkeypatch):
    events = finished(Noted("model"), tmp_path, monkeypatch, model="words")
    assert events == ["weights of model model", "guests", "model: model model, model, words", "closed True"]


def test_a_run_that_only_evaluates_leaves_no_model(tmp_path, monkeypatch):
    assert finished(Noted("actor"), tmp_path, monkeypatch, trains=False, actor="words") == ["closed False"]


def test_a_model_that_is_not_read_again_has_the_digest_of_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    read, unread = (start_digests({"flag": path}, str(tmp_path / "cache")) for path in (str(tmp_path), ""))
    assert list(read) == list(unread) == ["flag"]
    assert read["flag"]() != unread["flag"]() == start_digests({"flag": ""}, "elsewhere")["flag"]()
