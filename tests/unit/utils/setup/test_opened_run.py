"""What a run of any step leaves at its end, and in what order it is made."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.support.data_flags import data_flags
from training.step1_sft import STEP as SFT
from training.step2_dpo import STEP as DPO
from training.step2_reward import STEP as REWARD
from training.step3_ppo import STEP as PPO
from training.utils.base.console import WHOLE_RUN_VARIABLE
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.folder import MANIFEST, CheckpointFolder
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.checkpoints.plan import CheckpointPlan, check_settings
from training.utils.engine.ranks import backends
from training.utils.engine.ranks.backends import Backend, Backends
from training.utils.engine.ranks.startup import Ranks
from training.utils.models.settings import ModelSettings
from training.utils.run.run_folder import EndedRun, RunFolder
from training.utils.setup import opened_run
from training.utils.setup.flags import RunFlags
from training.utils.setup.opened_run import OpenedRun, PlannedRun, start_digests


class Noted:
    """Engines of a run, its average and its guests: each notes what is asked of it."""

    folder = "model_ema"

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

    def at_end(ended: EndedRun) -> str:
        noted.events.append(f"closed {ended.trains}")
        return "; well"

    monkeypatch.setattr(opened_run, "hooks", lambda name: [at_end, lambda ended: ""] if name == "at_end" else [])
    ranks: Any = Ranks(0, 0, 1, None)  # type: ignore[arg-type]
    whole: Any = noted
    parts = CheckpointParts(noted.engines, ranks, [whole] if average else [], tokenizers)
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
    assert capsys.readouterr().out == "the end; well\n" and (tmp_path / "summary.json").is_file()


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


@pytest.mark.parametrize(
    ("began_with", "given", "settled"),
    [
        (None, None, None),  # a new run
        ({}, None, None),
        ({"eval_interval": 0}, None, 0),  # written when that was the default
        ({"eval_interval": 0}, 3, 3),
        ({"eval_interval": 5}, None, 5),
    ],
)
def test_a_resumed_run_evaluates_as_it_began(tmp_path, monkeypatch, began_with, given, settled):
    settings = {"eval_interval": given, "head_chunk_mb": 0, "program": "p", "ranks": 1}
    if began_with is not None:
        (tmp_path / MANIFEST).write_text(json.dumps({"settings": began_with}))
    nothing: Any = None
    begun = tmp_path if began_with is not None else None
    (tmp_path / "summary.json").write_text("{}")  # of the run that is resumed, or of one that was killed
    plan = CheckpointPlan(CheckpointArguments(), CheckpointFolder(tmp_path), settings, begun)
    written: list[dict] = []
    monkeypatch.setattr(opened_run, "start_run", lambda run, settings, ranks, chosen: written.append(settings))
    monkeypatch.setattr(opened_run, "added", lambda table, known: {})
    ranks: Any = Ranks(0, 0, 1, None)  # type: ignore[arg-type]
    flags = RunFlags(nothing, nothing, CheckpointArguments(), nothing, nothing, {})
    opened = PlannedRun(flags, ranks, plan).opened("chat", ModelSettings("model"), "fp32", predicts_tokens=False)
    assert opened.plan.settings["eval_interval"] == written[0]["eval_interval"] == settled
    assert (tmp_path / "summary.json").exists() == (began_with is not None)


def planned(tmp_path, monkeypatch, step=SFT, began=None, **split):
    """The settings and the data flags of a run that is about to begin, or resumes one that began with `began`."""
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    alone = contextlib.nullcontext(ranks)
    monkeypatch.setattr(opened_run, "started_process_group", lambda *given: alone)
    monkeypatch.setattr(opened_run, "only_run_in", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(CheckpointPlan, "began_with", lambda self, name: (began or {}).get(name))
    data, run = data_flags(data_path=["embedded"], **split), SimpleNamespace(output_dir=str(tmp_path))
    faults: Any = SimpleNamespace(rank_timeout=1.0)
    settings = {"data_split": data.split.data_split, "prompt_style": "auto"}
    flags = RunFlags(step, run, CheckpointArguments(), faults, data, settings)  # type: ignore[arg-type]
    with opened_run.planned_run(flags) as found:
        assert found.plan.flags_in_use == found.flags.settings  # as config.yaml and the report have them
        assert found.flags.settings["data_split"] == found.flags.data.split.data_split
        return found.flags.data.split.data_split


@pytest.mark.parametrize(("step", "share"), [(SFT, "1,0,0"), (REWARD, "0,1,0"), (DPO, "0,1,0"), (PPO, "0,0,1")])
def test_a_step_alone_takes_every_row_and_its_settings_say_so(tmp_path, monkeypatch, step, share):
    monkeypatch.delenv(WHOLE_RUN_VARIABLE, raising=False)
    assert planned(tmp_path, monkeypatch, step) == share
    assert planned(tmp_path, monkeypatch, step, data_split="3,3,4") == "3,3,4"


def test_steps_of_a_whole_run_share_the_rows(tmp_path, monkeypatch):
    monkeypatch.setenv(WHOLE_RUN_VARIABLE, "1")
    assert planned(tmp_path, monkeypatch) == "2,4,4"
    assert planned(tmp_path, monkeypatch, data_split="1,1,0") == "1,1,0"


def test_a_resumed_run_keeps_the_share_that_it_began_with(tmp_path, monkeypatch):
    """2,4,4 was the default of every step."""
    assert planned(tmp_path, monkeypatch, began={"data_split": "2,4,4"}) == "2,4,4"
    assert planned(tmp_path, monkeypatch, began={"data_split": "2,4,4"}, data_split="1,0,0") == "1,0,0"
    begun = {"data_split": "2,4,4", "program": "p", "ranks": 1}
    check_settings(Path("step_1"), {"settings": begun, "defaults": {}}, {**begun, "data_split": "auto"}, {})
    with pytest.raises(ThreestepError, match="--data_split was 2,4,4 and is 1,0,0"):
        check_settings(Path("step_1"), {"settings": begun, "defaults": {}}, {**begun, "data_split": "1,0,0"}, {})


def test_backends_are_decided_with_what_the_run_began_with(monkeypatch, tmp_path):
    """What plugins decide is in the settings of the run and of its checkpoints; a run that resumes none has begun with
    nothing."""

    def decide(settings, device, began_with):
        return Backend(decided={"own": [settings["own"], began_with and began_with("own")]})

    monkeypatch.setattr(backends, "added", lambda table, known: {"own": "decide"} if table == "backends" else {})
    monkeypatch.setattr(backends, "named_object", {"decide": decide}.get)
    monkeypatch.setattr(CheckpointPlan, "began_with", lambda self, name: {"own": "earlier"}.get(name))
    monkeypatch.setattr(opened_run, "only_run_in", lambda *given: contextlib.nullcontext())
    alone = contextlib.nullcontext(Ranks(0, 0, 1, torch.device("cpu")))
    monkeypatch.setattr(opened_run, "started_process_group", lambda *given: alone)
    run: Any = SimpleNamespace(output_dir=str(tmp_path))
    flags, faults, data = CheckpointArguments(), SimpleNamespace(rank_timeout=1.0), data_flags(data_path=["embedded"])
    for resumes, began in ((None, None), (tmp_path, "earlier")):
        plan = CheckpointPlan(flags, None, {}, resumes)  # type: ignore[arg-type]
        monkeypatch.setattr(opened_run, "plan_checkpoints", lambda *given, plan=plan, **named: plan)
        with opened_run.planned_run(RunFlags(SFT, run, flags, faults, data, {"own": 1})) as found:  # type: ignore[arg-type]
            assert found.flags.settings["own"] == found.plan.settings["own"] == [1, began]


def test_the_backends_of_the_ranks_hold_in_the_loop_alone(monkeypatch, tmp_path):
    taken: list[str] = []

    @contextlib.contextmanager
    def noted(name):
        taken.append(f"in {name}")
        yield
        taken.append("out")

    records = contextlib.nullcontext(("metrics", "checkpoints"))
    monkeypatch.setattr(opened_run, "checkpointed_run", lambda *given, **named: records)
    nothing: Any = None
    flags: Any = SimpleNamespace(trains=False, faults=SimpleNamespace(max_bad_steps=1))
    own = Backends([Backend(partial(noted, "one")), Backend(partial(noted, "other"), words="other words"), Backend()])
    ranks = Ranks(0, 0, 1, torch.device("cpu"), backends=own)
    run = OpenedRun(flags, ranks, nothing, RunFolder(str(tmp_path), True), nothing, "fp32")
    report: Any = ModelSettings("any dataclass")
    data = opened_run.RunData(report, "rows", 1.0)
    with run.recorded(nothing, data, {}):
        taken.append("the loop")
    assert taken == ["in one", "in other", "the loop", "out", "out"] and own.words == ["other words"]


def test_the_style_that_rows_have_is_written_to_the_settings(tmp_path):
    ranks: Any = Ranks(0, 0, 1, None)  # type: ignore[arg-type]
    nothing: Any = None
    plan = CheckpointPlan(CheckpointArguments(), nothing, {"prompt_style": "human_assistant", "seed": 3}, None)
    run = OpenedRun(nothing, ranks, plan, RunFolder(str(tmp_path), True), nothing, "fp32")
    assert run.styled("human_assistant") is run and not (tmp_path / "config.yaml").exists()
    styled = run.styled("as_stored")
    assert styled.plan.settings == {"prompt_style": "as_stored", "seed": 3}
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == styled.plan.settings
