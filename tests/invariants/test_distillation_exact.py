"""Distillation by the engine equals plain PyTorch in float64, one sequence at a time: in packed and padded rows, in
micro-batches, on one rank and two, student and teacher at their own ZeRO stages."""

from __future__ import annotations

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.invariants import plain
from tests.invariants.engine_program import (
    LONGEST,
    PER_STEP,
    SEED,
    Case,
    column,
    keep_weights,
    make_engine,
    rows_of,
    trained,
)
from tests.invariants.launched import each_case
from tests.invariants.test_engine_exact import start_of
from threestep.plugins.distillation.feature import TeacherFeature
from threestep.plugins.distillation.settings import DivergenceSettings, TeacherSettings
from training.utils.setup.guests import GuestFeatures

COEF, LIKELIHOOD = 0.7, 0.4
TEACHER = "untied"


class Shape(NamedTuple):
    """micro: sequences of a forward; PER_STEP in all, so that few are several micro-batches. stage, teacher_stage: of
    ZeRO. divergence, beta, top_k: see `DivergenceSettings`."""

    micro: int
    stage: int
    packed: bool
    teacher_stage: int
    divergence: str = "js"
    beta: float = 0.3
    top_k: int = 0
    file: str | None = None


CASES = {
    1: {
        "z0": Shape(6, 0, True, 0),
        "reverse_parts": Shape(2, 0, True, 0, "reverse", 0.5),
        "z3_z3": Shape(2, 3, True, 3),
        "padded_z2": Shape(2, 2, False, 0, "forward", 0.5, 7),
        "file_z3": Shape(2, 3, True, 0, "forward", 0.5, 7, "teacher.jsonl"),
    },
    2: {
        "z0_parts": Shape(1, 0, True, 0),
        "z3_z3": Shape(3, 3, True, 3),
        "z3_parts_z0": Shape(1, 3, True, 0, "reverse", 0.5, 7),
        "z1_z3": Shape(2, 1, False, 3, "forward", 0.5),
        "z2_parts": Shape(1, 2, True, 0, "js", 0.3, 7),
        "file_z2_z3": Shape(1, 2, True, 3, "js", 0.3, 7, "teacher.parquet"),
    },
}
ORDINARY = {1: ("reverse_parts", "padded_z2"), 2: ("z3_z3", "file_z2_z3")}


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    """Train SFT beside a teacher, which writes its file first where the case has one."""
    names = CASES[ranks.world_size] if is_long else ORDINARY[ranks.world_size]
    return {name: run_case(name, models, out, ranks) for name in names}


def run_case(name: str, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    shape = CASES[ranks.world_size][name]
    case = Case(name, zero_stage=shape.stage, micro=shape.micro, packed=shape.packed)
    teacher = TeacherSettings(
        str(models / TEACHER),
        None if shape.file is None else str(out / name / shape.file),
        compared=DivergenceSettings(*shape[4:7]),
        coef=COEF,
        zero_stage=shape.teacher_stage,
        padded=not shape.packed,
        longest_tokens=LONGEST,
    )
    engine, model = make_engine(case, models, ranks)
    features = GuestFeatures([TeacherFeature(teacher, likelihood_coef=LIKELIHOOD)])
    lines, _ = trained(case, engine, model, out / name, ranks, features, str(models / case.model), 0)
    keep_weights(engine, model, out / name)
    steps = [line for line in lines if "train/loss" in line]
    return {
        "losses": column(steps, "train/loss"),
        "divergences": column(steps, "train/teacher_divergence"),
        "masses": [line.get("train/teacher_mass") for line in steps],
        "norms": column(steps, "train/grad_norm"),
        "evaluated": column(lines, "eval/teacher_divergence"),
    }


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first * (first.log() - second.log())).sum()


def divergence_of(student: torch.Tensor, teacher: torch.Tensor, kind: str, beta: float, top_k: int) -> torch.Tensor:
    """Of two probability vectors, as GKD defines it."""
    if top_k:
        ids = teacher.topk(top_k).indices
        parts = [each[ids] for each in (student, teacher)]
        student, teacher = (torch.cat([part, (1.0 - part.sum()).unsqueeze(0)]) for part in parts)
    if kind == "forward":
        return kl(teacher, student)
    if kind == "reverse":
        return kl(student, teacher)
    mixture = beta * teacher + (1.0 - beta) * student
    return beta * kl(teacher, mixture) + (1.0 - beta) * kl(student, mixture)


def mean_divergence(model: Any, teacher: Any, batch: list, kind: str, beta: float, top_k: int) -> torch.Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in batch:
        ids = torch.tensor(row.input_ids).unsqueeze(0)
        with torch.no_grad():
            theirs = torch.softmax(teacher(input_ids=ids).logits[0], dim=-1)
        own = torch.softmax(model(input_ids=ids).logits[0], dim=-1)
        for place in range(1, len(row.input_ids)):
            if row.loss_mask[place]:
                total = total + divergence_of(own[place - 1], theirs[place - 1], kind, beta, top_k)
                count += 1
    return total / count


@cache
def trained_plainly(folder: Path, kind: str, beta: float, top_k: int) -> tuple[list[float], list[float], plain.Trained]:
    """Likelihoods and divergences of the steps, and the training by their weighted sum."""
    model: Any = copy.deepcopy(start_of(folder / "causal", "sft"))
    teacher = start_of(folder / TEACHER, "sft")
    likelihoods: list[float] = []
    divergences: list[float] = []

    def loss_of(student: Any, batch: list) -> torch.Tensor:
        nll = plain.sft_loss(student, batch)
        found = mean_divergence(student, teacher, batch, kind, beta, top_k)
        likelihoods.append(float(nll.detach()))
        divergences.append(float(found.detach()))
        return LIKELIHOOD * nll + COEF * found

    rows, _ = rows_of("sft", "plain", PER_STEP)
    batches = plain.batches_of(rows, PER_STEP, SEED)
    return likelihoods, divergences, plain.train(model, batches, loss_of, plain.Recipe())


@pytest.mark.parametrize("world_size, case", each_case(CASES, ORDINARY))
def test_a_student_is_that_of_plain_pytorch(launched, models, world_size: int, case: str):
    out, reports = launched("test_distillation_exact", world_size)
    found, shape = reports[0][case], CASES[world_size][case]
    likelihoods, divergences, expected = trained_plainly(models, shape.divergence, shape.beta, shape.top_k)
    assert found["losses"] == pytest.approx(likelihoods, rel=1e-5)
    assert found["divergences"] == pytest.approx(divergences, rel=1e-5)
    if shape.stage:  # DeepSpeed keeps none at stage 0
        assert found["norms"] == pytest.approx(expected.norms, rel=1e-5)
    assert all((mass is None) == (shape.top_k == 0) for mass in found["masses"])
    assert all(mass is None or 0.0 < mass < 1.0 for mass in found["masses"])
    got, start = torch.load(out / case / "weights.pt"), start_of(models / "causal", "sft")
    assert plain.residual(got, expected.weights, start) < 2e-5
    assert len(found["evaluated"]) == 2 and all(map(math.isfinite, found["evaluated"]))
