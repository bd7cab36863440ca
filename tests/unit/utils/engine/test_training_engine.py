"""Which weights train at which rate, before DeepSpeed sees the optimizer; what becomes of steps whose loss or gradient
is not finite (that they change nothing: tests/invariants); a forward that runs out of memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.documents import plain as plain_document
from training.utils.engine.bad_steps import BadSteps
from training.utils.engine.config.arguments import OPTIMIZERS, EngineSettings
from training.utils.engine.optimizers import FiniteSteps, checked, make_optimizer
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.training_engine import TrainingEngine, _scheduler, memory_explained, rows_in_words
from training.utils.layout.rows import packed_rows
from training.utils.models.weights import Adapters, mark_adapted
from training.utils.plugins.plugin import OptimizerEntry
from training.utils.run.run_folder import BAD_STEPS, RunLog

RATE, ADAPTER_RATE, DECAY = 1e-3, 5e-2, 0.1


class Factors(Adapters):
    """Two matrices beside a layer's own."""

    def __init__(self, rate: float | None) -> None:
        self.learning_rate = rate

    def holds(self, name: str) -> bool:
        return ".added_" in name


def adapted(rate: float | None) -> torch.nn.Module:
    """Its layer's own weight is frozen."""
    layer = torch.nn.Module()
    layer.own = torch.nn.Linear(3, 3)
    layer.own.weight.requires_grad_(False)
    layer.added_A, layer.added_B = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
    mark_adapted(layer, Factors(rate))
    return torch.nn.ModuleDict({"layer": layer, "score": torch.nn.Linear(3, 1)})


def rates_and_decays(module: torch.nn.Module, **settings: float) -> dict[str, tuple[float, float]]:
    engine_settings = EngineSettings(learning_rate=RATE, weight_decay=DECAY, **settings)
    groups = make_optimizer(module, engine_settings).param_groups
    of = {id(weight): (group["lr"], group["weight_decay"]) for group in groups for weight in group["params"]}
    return {name: of[id(weight)] for name, weight in module.named_parameters() if id(weight) in of}


def test_adapters_train_at_their_own_rate():
    adapters = ("layer.added_A.weight", "layer.added_B.weight")
    others = {"layer.own.bias": (RATE, 0.0), "score.weight": (RATE, DECAY), "score.bias": (RATE, 0.0)}
    assert rates_and_decays(adapted(ADAPTER_RATE)) == {
        **dict.fromkeys(adapters, (ADAPTER_RATE, DECAY)),
        **others,
    }
    assert rates_and_decays(adapted(None)) == {**dict.fromkeys(adapters, (RATE, DECAY)), **others}


def test_adams_settings_reach_it():
    settings = EngineSettings(adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=1e-3)
    for group in make_optimizer(torch.nn.Linear(2, 2), settings).param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.7), 1e-3)


@pytest.mark.parametrize("schedule", ["cosine", "polynomial"])  # one of ours, one of transformers'
def test_a_share_of_the_run_warms_up_as_its_steps_do(schedule):
    """0.25 of 10 steps is 2.5, and rounds up to 3."""

    def rates(**warmup: float) -> list[float]:
        settings = EngineSettings(learning_rate=RATE, lr_scheduler_type=schedule, **warmup)
        optimizer = make_optimizer(torch.nn.Linear(2, 2), settings)
        scheduler, found = _scheduler(optimizer, settings, total_steps=10), []
        for _ in range(10):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert rates(warmup_ratio=0.25) == rates(num_warmup_steps=3) != rates(num_warmup_steps=2)


def test_a_model_that_is_frozen_as_a_whole_is_refused():
    frozen, alone = torch.nn.Linear(2, 2).requires_grad_(False), Ranks(0, 0, 1, torch.device("cpu"))
    with pytest.raises(ThreestepError, match="^nothing to train: every weight .* frozen; unfreeze some, or train adap"):
        TrainingEngine(frozen, EngineSettings(), alone, total_steps=1)


def rows(*lengths: tuple[int, ...]):
    def document(length: int):
        return plain_document(TokenSequence(torch.arange(length), torch.arange(length) > 0))

    return packed_rows([[document(length) for length in row] for row in lengths], 0)


def test_rows_in_words():
    words = rows_in_words(rows((3, 2), (4,)))
    assert words == "2 rows of 5 tokens (3 sequences; tokens per row without padding: 5, 4)"
    assert rows_in_words(rows(*[(1,)] * 17)).endswith("1, 1, ...)") and rows_in_words(None) == "a micro-batch"


@pytest.mark.parametrize(
    ("problem", "start"),
    [
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory."),
            "out of memory on rank 1 in a forward of 1 row of 7",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: x"),
            "out of memory on rank 1 in a forward",
        ),
        (
            RuntimeError("cumsum_cuda does not have a deterministic implementation, but you set ..."),
            "--deterministic: a forward of 1 row of 7 tokens",
        ),
        (RuntimeError("shapes differ"), "shapes differ"),
    ],
    ids=["CUDA", "CPU", "deterministic", "other"],
)
def test_what_a_forward_cannot_do_is_explained(problem, start):
    with (
        pytest.raises((ThreestepError, RuntimeError)) as error,
        memory_explained("a forward", 1, lambda: rows_in_words(rows((7,)))),
    ):
        raise problem
    said = str(error.value)
    assert said.startswith(start) and str(problem)[:30] in said
    assert ("--max_tokens_per_micro_batch" in said) == start.startswith("out of memory")


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.5)])
def test_a_step_that_is_not_finite_is_left_out(make):
    """Its own state stays too: the step after it is the first one's twin of a run without."""
    ends = []
    for slopes in ([1.0, NAN, 0.5], [1.0, 0.5]):
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = checked(make([weight]))
        for slope in slopes:
            before = weight.detach().clone()
            weight.grad = torch.tensor([1.0, slope])
            optimizer.step()
            assert optimizer.overflow == (slope != slope)
            assert weight.equal(before) == optimizer.overflow
        ends.append(weight.detach().clone())
    assert ends[0].equal(ends[1])
    checked(make([torch.nn.Parameter(torch.zeros(1))])).step()  # without gradients


def plain(groups: Any, settings: EngineSettings) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.adam_beta1)


def nothing(groups: Any, settings: EngineSettings) -> None:
    return None


@pytest.mark.parametrize(("stage", "dtype", "is_checked"), [(0, "fp32", True), (0, "bf16", False), (2, "fp32", False)])
def test_an_optimizer_of_a_plugin_gets_the_groups_and_the_settings(monkeypatch, stage, dtype, is_checked):
    monkeypatch.setitem(OPTIMIZERS, "plain", OptimizerEntry(f"{__name__}:plain"))
    settings = EngineSettings(
        optimizer="plain", learning_rate=0.5, adam_beta1=0.8, weight_decay=0.1, zero_stage=stage, dtype=dtype
    )
    made = make_optimizer(torch.nn.Linear(2, 2), settings)
    assert isinstance(made, torch.optim.SGD) and isinstance(made, FiniteSteps) == is_checked
    groups = [(group["lr"], group["momentum"], group["weight_decay"]) for group in made.param_groups]
    assert groups == [(0.5, 0.8, 0.1), (0.5, 0.8, 0.0)]
    monkeypatch.setitem(OPTIMIZERS, "plain", OptimizerEntry(f"{__name__}:nothing"))
    with pytest.raises(
        ThreestepError, match=f"--optimizer plain: {__name__}:nothing must return .* returned a NoneType"
    ):
        make_optimizer(torch.nn.Linear(2, 2), settings)


BATCH = [7, 3]
NAN = float("nan")


def test_bad_steps_are_told_with_their_rows_and_the_last_ends_the_run(tmp_path: Path, capsys):
    counter = BadSteps(2, RunLog(tmp_path / BAD_STEPS))
    counter.check(1, {"train/loss": 2.0, "train/skipped": 0.0, "train/accuracy": NAN}, BATCH)
    BadSteps(5, RunLog(tmp_path / BAD_STEPS), is_main_rank=False).check(1, {"train/loss": NAN}, BATCH)
    searching = BadSteps(1, dtype="fp16")  # for a loss scale
    searching.check(1, {"train/loss": 1.0, "train/skipped": 1.0}, BATCH)
    assert counter.count == searching.count == 0 and not list(tmp_path.iterdir()) and capsys.readouterr().out == ""
    with pytest.raises(ThreestepError, match="1 optimizer step had a non-finite loss"):
        searching.check(2, {"critic/value_loss": float("inf"), "critic/skipped": 1.0}, BATCH)
    counter.check(4, {"train/loss": NAN, "train/skipped": 1.0}, BATCH)
    assert capsys.readouterr().out == (
        "warning: step 4 was skipped: its loss or gradient is not finite (train/loss nan, train/skipped 1); the row "
        f"ids of its batch are in {tmp_path}/bad_steps.jsonl; 1 of at most 2 (--max_bad_steps)\n"
    )
    counter.check(5, {"train/loss": 1.0, "train/skipped": 0.0}, BATCH)
    with pytest.raises(ThreestepError) as error:
        counter.check(6, {"train/loss": 1.0, "train/skipped": 1.0}, BATCH[:1])
    assert str(error.value) == (
        "2 optimizer steps had a non-finite loss or gradient, which is the limit set by --max_bad_steps 2; the "
        f"last was step 6 (train/skipped 1); the row ids of its batch are in {tmp_path}/bad_steps.jsonl; the "
        "weights were left unchanged: check those rows, lower the learning rate, or train with --dtype fp32"
    )
    lines = [json.loads(line) for line in (tmp_path / "bad_steps.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 4, "figures": {"train/loss": "nan", "train/skipped": "1.0"}, "row_ids": [7, 3]},
        {"step": 6, "figures": {"train/skipped": "1.0"}, "row_ids": [7]},
    ]
