"""The recorder: nothing where nobody asks; what it watches and writes, and a disk that refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.documents import TokenSequence
from training.utils.engine.accumulate import MicroBatch, MicroLoss
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.rows import padded_rows
from training.utils.recording import recorder
from training.utils.recording.content import of_sequences, of_targets
from training.utils.recording.files import RecordHead, read_record
from training.utils.recording.recorder import NOT_RECORDED, RecordContent, StepRecords, WatchedStep, records_of
from training.utils.run.run_arguments import RunArguments

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


def record_of(watched: Any) -> RecordContent:
    head = RecordHead("sft", 2, figures={"loss": 3.0, "grad_norm": float("nan")})
    reads = watched["train"]
    return RecordContent(head, {**of_sequences(reads), **of_targets(reads)})


def test_a_step_that_nobody_asks_for_is_left_alone():
    module = Module()
    given = micro_batches(module)
    recording = StepRecords(frozenset([3])).of_step(2, RANKS)
    assert recording.watched("train", Engine(module), given) is given and not module._forward_hooks
    recording.write(lambda watched: pytest.fail("nothing is made"))


def test_a_step_is_recorded(tmp_path: Path, capsys):
    module = Module()
    recording = StepRecords(frozenset([2]), tmp_path).of_step(2, RANKS)
    watched = recording.watched("train", Engine(module), micro_batches(module))
    losses = [micro_batch.loss().loss for micro_batch in watched]
    assert [loss.item() for loss in losses] == [3.0, 3.0] and losses[0].requires_grad
    recording.write(record_of)
    assert not module._forward_hooks
    found = read_record(tmp_path / "step_000002")
    own = found.ranks[0]
    assert own["token_ids"].tolist() == [5, 6, 7] and own["logprobs"].tolist() == [0, 1, 2]
    assert own["loss_mask"].tolist() == [False, True, True] and own["micro_losses"].tolist() == [3.0]
    assert found.head.figures == {"loss": 3.0} and found.head.trainer["name"] == "threestep"
    assert f"record of the step: {tmp_path / 'step_000002'}" in capsys.readouterr().out


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path, capsys):
    (tmp_path / "records").write_text("a file")
    module = Module()
    recording = StepRecords(frozenset([2]), tmp_path / "records").of_step(2, RANKS)
    [first, _] = recording.watched("train", Engine(module), micro_batches(module))
    first.loss()
    recording.write(record_of)
    assert "warning: no record of this step: the disk refuses" in capsys.readouterr().out


def test_the_flags_name_the_folders(tmp_path: Path):
    records = records_of(RunArguments(output_dir=str(tmp_path), record_steps=[1, 10]))
    assert (records.steps, records.folder) == (frozenset([1, 10]), tmp_path / "records")
    assert records.digests is not None and records.digests.path == tmp_path / "digests.jsonl"
    assert records_of(RunArguments(digests=False)).digests is None
    recording = records.of_step(10, RANKS, update=2)
    assert recording.record.folder == tmp_path / "records" / "step_000010_update2"  # type: ignore[attr-defined]


def test_rows_that_no_record_can_hold_end_nothing(tmp_path: Path, monkeypatch, capsys):
    def refuse(rows: Any, *, keeps_media: bool) -> None:
        raise ThreestepError("no single run")

    monkeypatch.setattr(recorder, "sequences_of", refuse)
    module = Module()
    recording = StepRecords(frozenset([2]), tmp_path).of_step(2, RANKS)
    [first, _] = recording.watched("train", Engine(module), micro_batches(module))
    first.loss()
    recording.write(record_of)
    assert "warning: no record of this step: no single run" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()) and not module._forward_hooks


def test_parallel_thinking_is_refused():
    mistakes = Mistakes()
    RunArguments(record_steps=[1]).check_records(mistakes, False)
    RunArguments().check_records(mistakes, True)
    mistakes.raise_if_any()
    RunArguments(record_steps=[1]).check_records(mistakes, True)
    with pytest.raises(ThreestepError, match="--record_steps expects sequences that are one run of tokens each, and"):
        mistakes.raise_if_any()


def test_a_step_to_be_explained_is_recorded_with_its_values(tmp_path: Path):
    records = records_of(RunArguments(output_dir=str(tmp_path), explain_steps=[2], record_steps=[3], digests=False))
    two, three = records.of_step(2, RANKS), records.of_step(3, RANKS)
    assert isinstance(two, WatchedStep) and two.keeps_values
    assert isinstance(three, WatchedStep) and not three.keeps_values
    assert records.of_step(1, RANKS) is NOT_RECORDED


@pytest.mark.parametrize("flag", ["explain_steps", "record_steps"])
def test_rows_over_several_ranks_are_not_recorded(flag: str):
    from training.utils.sequence_parallel.checks import check_beside

    mistakes = Mistakes()
    check_beside(mistakes, 1, RunArguments(**{flag: [2]}).recording)
    mistakes.raise_if_any()
    check_beside(mistakes, 2, RunArguments(**{flag: [2]}).recording)
    with pytest.raises(ThreestepError, match=f"--sequence_parallel_size 2 cannot go with --{flag} yet"):
        mistakes.raise_if_any()


def test_parallel_paths_have_no_records_to_explain():
    mistakes = Mistakes()
    RunArguments(explain_steps=[1]).check_records(mistakes, parallel_thinking=True)
    assert "--explain_steps expects sequences" in str(mistakes.sentences)
