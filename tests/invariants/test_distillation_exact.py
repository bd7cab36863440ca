"""Distillation by the engine equals plain PyTorch in float64, one sequence at a time: in packed and padded rows, in
micro-batches, on one rank and two, student and teacher at their own ZeRO stages."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.invariants import distillation_program as program
from tests.invariants import engine_program, plain
from tests.invariants.test_engine_exact import start_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


def cases() -> list[Any]:
    return [
        pytest.param(size, case, marks=[] if case in program.ORDINARY[size] else [pytest.mark.long])
        for size in (1, 2)
        for case in program.CASES[size]
    ]


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
    import copy

    model: Any = copy.deepcopy(start_of(folder / "causal", "sft"))
    teacher = start_of(folder / program.TEACHER, "sft")
    likelihoods: list[float] = []
    divergences: list[float] = []

    def loss_of(student: Any, batch: list) -> torch.Tensor:
        nll = plain.sft_loss(student, batch)
        found = mean_divergence(student, teacher, batch, kind, beta, top_k)
        likelihoods.append(float(nll.detach()))
        divergences.append(float(found.detach()))
        return program.LIKELIHOOD * nll + program.COEF * found

    rows, _ = engine_program.rows_of("sft", "plain", engine_program.PER_STEP)
    batches = plain.batches_of(rows, engine_program.PER_STEP, engine_program.SEED)
    return likelihoods, divergences, plain.train(model, batches, loss_of, plain.Recipe())


@pytest.mark.parametrize("world_size, case", cases())
def test_a_student_is_that_of_plain_pytorch(launched, models, world_size: int, case: str):
    out, reports = launched("distillation_program", world_size)
    found, shape = reports[0][case], program.CASES[world_size][case]
    likelihoods, divergences, expected = trained_plainly(models, shape.divergence, shape.beta, shape.top_k)
    assert found["losses"] == pytest.approx(likelihoods, rel=1e-5)
    assert found["divergences"] == pytest.approx(divergences, rel=1e-5)
    if shape.stage:  # DeepSpeed keeps none at stage 0
        assert found["norms"] == pytest.approx(expected.norms, rel=1e-5)
    assert all((mass is None) == (shape.top_k == 0) for mass in found["masses"])
    assert all(mass is None or 0.0 < mass < 1.0 for mass in found["masses"])
    got, start = torch.load(out / case / "model.pt"), dict(start_of(models / "causal", "sft").named_parameters())
    update = torch.cat([(weight - start[name].detach()).flatten() for name, weight in expected.weights.items()])
    missed = torch.cat([(got[name].double() - weight).flatten() for name, weight in expected.weights.items()])
    assert float(missed.norm() / update.norm()) < 2e-5
    assert len(found["evaluated"]) == 2 and all(map(math.isfinite, found["evaluated"]))
