"""Launched on one or two ranks: SFT beside a teacher.

Arguments: the folder of the models, a folder for the weights, and "long" for every case. Report: {case: {"losses",
"divergences", "masses", "norms", "evaluated"}}. In cases with a file the teacher writes it first.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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


def main(models: Path, out: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from training.utils.engine.ranks.startup import started_process_group

    with started_process_group() as ranks:
        names = CASES[ranks.world_size] if is_long else ORDINARY[ranks.world_size]
        report({name: run_case(name, models, out, ranks) for name in names})


def run_case(name: str, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    """Train; keep the weights."""
    import json

    import torch

    from tests.invariants.engine_program import LONGEST, PAD, SEED, STEPS, Case, make_engine, rows_of
    from tests.support.data_flags import data_flags
    from threestep.plugins.distillation.feature import TeacherFeature
    from threestep.plugins.distillation.settings import DivergenceSettings, TeacherSettings
    from training.step1_sft.trainer import SftTrainer
    from training.utils.engine.config.arguments import EngineArguments
    from training.utils.run.metrics import MetricsWriter
    from training.utils.run.run_arguments import RunArguments
    from training.utils.run.trackers import LogArguments
    from training.utils.setup.guests import GuestFeatures
    from training.utils.setup.one_model_run import loop_settings
    from training.utils.setup.training_run import TrainingRun

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
    train_rows, eval_rows = rows_of("sft", "plain", case.per_step)
    engine_flags = EngineArguments(
        per_device_train_batch_size=case.micro, per_device_eval_batch_size=2, report_mfu=False
    )
    data, reporting = data_flags(max_seq_len=LONGEST), LogArguments()
    settings, run = GuestFeatures([TeacherFeature(teacher, likelihood_coef=LIKELIHOOD)]), RunArguments(seed=SEED)
    flags: Any = SimpleNamespace(run=run, engine=engine_flags, data=data, reporting=reporting, guests=settings)
    loop = loop_settings(flags, (STEPS, case.per_step), model, case.packed, ranks=ranks, pad_token_id=PAD)
    loop = replace(loop, eval_interval=0)
    [guests] = settings.open([(engine, model)], str(models / case.model), STEPS, 0)
    folder = out / name
    folder.mkdir(exist_ok=True)
    with MetricsWriter(folder, ranks.is_main) as metrics:
        run = TrainingRun(engine, train_rows, eval_rows, loop, metrics, guests=guests)
        SftTrainer(run).train()
    weights = engine.full_state(model)
    if not ranks.is_main:
        return {}
    torch.save(weights, folder / "model.pt")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    return {
        "losses": [line["train/loss"] for line in steps],
        "divergences": [line["train/teacher_divergence"] for line in steps],
        "masses": [line.get("train/teacher_mass") for line in steps],
        "norms": [line.get("train/grad_norm") for line in steps],
        "evaluated": [line["eval/teacher_divergence"] for line in lines if "eval/teacher_divergence" in line],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["long"])
