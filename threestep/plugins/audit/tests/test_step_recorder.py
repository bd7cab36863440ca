"""The recorder: nothing where nobody asks; what it watches and writes, and a disk that refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from threestep.plugins.audit import step_recorder
from threestep.plugins.audit.recording.content import (
    RecordContent,
    StepKind,
    Watched,
    of_sequences,
    of_targets,
    step_numbers,
)
from threestep.plugins.audit.recording.files import RecordHead, read_record
from threestep.plugins.audit.step_recorder import DigestedStep, StepRecorder, WatchedStep, open_recorder
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.guests import Guest, Guests
from training.utils.contracts.run import NOT_OBSERVED, ObservedRun, StepTaken
from training.utils.data.rows.arguments import ChatArguments
from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.rows import padded_rows

pytestmark = pytest.mark.unit

RANKS = Ranks(0, 0, 1, torch.device("cpu"))


class Module(nn.Module):
    def forward(self, rows: Any) -> torch.Tensor:
        return torch.arange(1.0, len(rows.target_ids_M) + 1.0, requires_grad=True)


@dataclass
class Deep:
    """As much of DeepSpeed's engine as a watched step reads."""

    def _take_model_step(self, kwargs: Any) -> None: ...

    def gradient_clipping(self) -> float:
        return 1.0


@dataclass
class Engine:
    module: nn.Module
    engine: Deep = field(default_factory=Deep)
    settings: EngineSettings = field(default_factory=EngineSettings)
    total_steps: int = 4


def micro_batches(module: nn.Module) -> list[MicroBatch]:
    """Two of one sequence each; the second only reads."""
    rows = [padded_rows([TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]))], 0)] * 2

    def loss(own: Any) -> MicroLoss:
        return MicroLoss(module(own).sum(), {})

    return [MicroBatch(own, lambda own=own: loss(own), learns=place == 0) for place, own in enumerate(rows)]


def record_of(step: StepTaken, watched: Watched) -> RecordContent:
    head = RecordHead("sft", step.number, figures={"loss": 3.0, "grad_norm": float("nan")})
    reads = watched["train"]
    return RecordContent(head, {**of_sequences(reads), **of_targets(reads)}, {"z_loss_coef": 0.5, "embedding_noise": 0})


TAKEN = StepTaken(2, {"loss": 3.0, "tokens": 4.0}, lambda: [7, 8])


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    """Steps of the kind "" are known to records; those of other kinds are not."""
    known = {"": StepKind(record_of)}
    monkeypatch.setattr(step_recorder, "kind_of", known.get)


def trainee(module: nn.Module, *guests: Guest) -> Trainee:
    return Trainee("train", Engine(module), micro_batches(module), Guests(guests))  # type: ignore[arg-type]


def of_folder(folder: Path, *steps: int) -> StepRecorder:
    return StepRecorder(RANKS, folder, frozenset(steps), notes=lambda: {"template_prompt": "5 6"})


def test_a_step_that_nobody_asks_for_is_left_alone():
    module = Module()
    given = trainee(module)
    observed = of_folder(Path(), 3).begin(2)
    assert observed is NOT_OBSERVED and observed.watched(given) is given and not module._forward_hooks
    observed.taken(TAKEN)


def test_a_step_is_recorded(tmp_path: Path, capsys):
    module = Module()
    observed = of_folder(tmp_path, 2).begin(2)
    watched = observed.watched(trainee(module, Guest()))
    losses = [micro_batch.loss().loss for micro_batch in watched.micro_batches]
    assert [loss.item() for loss in losses] == [3.0, 3.0] and losses[0].requires_grad
    observed.taken(TAKEN)
    assert not module._forward_hooks
    found = read_record(tmp_path / "step_000002")
    own = found.ranks[0]
    assert own["token_ids"].tolist() == [5, 6, 7] and own["logprobs"].tolist() == [0, 1, 2]
    assert own["loss_mask"].tolist() == [False, True, True] and own["micro_losses"].tolist() == [3.0]
    assert found.head.figures == {"loss": 3.0} and found.head.trainer["name"] == "threestep"
    settings = found.head.settings
    assert settings["z_loss_coef"] == 0.5 and settings["other_terms"] is True
    assert settings["template_prompt"] == "5 6" and "embedding_noise" not in settings  # which is 0
    assert f"recorded this step in {tmp_path / 'step_000002'}" in capsys.readouterr().out


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path, capsys):
    (tmp_path / "records").write_text("a file")
    observed = of_folder(tmp_path / "records", 2).begin(2)
    observed.watched(trainee(Module())).micro_batches[0].loss()
    observed.taken(TAKEN)
    assert "warning: no record of this step, because it cannot be written" in capsys.readouterr().out


def opened(folder: Path, device: str = "cpu", **settings: Any) -> StepRecorder | None:
    own = {"digests": None, "record_steps": [], "record_values": False, **settings}
    ranks = Ranks(0, 0, 1, torch.device(device))
    return open_recorder(ObservedRun("training.x.main", own, folder, ranks, ChatArguments(), None))


def test_the_flags_name_the_folders(tmp_path: Path):
    found = opened(tmp_path, record_steps=[1, 10])
    assert found is not None and (found.steps, found.folder) == (frozenset([1, 10]), tmp_path / "records")
    assert found.digests is not None and found.digests.path == tmp_path / "digests.jsonl"
    step = found.begin(10, 2)
    assert isinstance(step, DigestedStep) and isinstance(step.record, WatchedStep)
    assert step.record.folder == tmp_path / "records" / "step_000010_update2"


@pytest.mark.parametrize(
    ("device", "digests", "has"),
    [("cpu", None, True), ("cpu", False, False), ("cuda", None, False), ("cuda", True, True)],
)
def test_digests_are_of_runs_on_a_cpu_unless_they_are_asked_for(tmp_path: Path, device, digests, has):
    assert (opened(tmp_path, device, digests=digests) is not None) is has
    found = opened(tmp_path, device, digests=digests, record_steps=[1])
    assert found is not None and (found.digests is not None) is has


def test_rows_that_no_record_can_hold_end_nothing(tmp_path: Path, monkeypatch, capsys):
    def refuse(rows: Any, *, keeps_media: bool) -> None:
        raise ThreestepError("no single run")

    monkeypatch.setattr(step_recorder, "sequences_of", refuse)
    module = Module()
    observed = of_folder(tmp_path, 2).begin(2)
    observed.watched(trainee(module)).micro_batches[0].loss()
    observed.taken(TAKEN)
    assert "warning: no record of this step: no single run" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()) and not module._forward_hooks


class OtherStep(StepTaken):
    kind = "hinge"


def test_a_kind_of_training_that_records_do_not_know_ends_nothing(tmp_path: Path, capsys):
    module = Module()
    observed = of_folder(tmp_path, 2).begin(2)
    observed.watched(trainee(module)).micro_batches[0].loss()
    observed.taken(OtherStep(2, {}, list))
    assert "no record of this step: records do not support training of the kind 'hinge'" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()) and not module._forward_hooks
    assert step_numbers(OtherStep(2, {"loss": 1.0}, lambda: [5]), True)[:2] == ([5], {"loss": 1.0})
    assert step_numbers(OtherStep(2, {"loss": 1.0}, lambda: [5]), False)[:2] == ((), {"loss": 1.0})


def test_a_step_to_be_explained_is_recorded_with_its_values(tmp_path: Path):
    found = opened(tmp_path, explain_steps=[2], record_steps=[3], digests=False)
    assert found is not None
    two, three = found.begin(2), found.begin(3)
    assert isinstance(two, WatchedStep) and two.keeps_values
    assert isinstance(three, WatchedStep) and not three.keeps_values
    assert found.begin(1) is NOT_OBSERVED
