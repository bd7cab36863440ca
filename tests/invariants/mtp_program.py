"""Launched on one or two ranks: SFT with a head for multi-token prediction, and without one.

Arguments: the folder of the models, a folder for the weights, and "long" for every case. Report: {case: {"losses",
"acceptances", "norms", "policy_moved", "speculated"}}; policy_moved: the largest difference of the policy's weights
from those of the same run without a head, if the head is trained beside it. speculated: of each rank, its rollout by
the head's guesses, that without, and the tokens a forward.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEPTHS = 2
COEF = 0.3
HEAD_SEED = 11
# (micro, ZeRO stage, packed), by ranks; PER_STEP sequences in all, so that 1 and 2 are several micro-batches. JOINT:
# the model learns from the head's loss too. Cases named shared_... have each row on both ranks.
CASES = {
    1: {"z0": (6, 0, True), "z3_parts": (2, 3, True), "padded": (2, 0, False), "z2_parts": (1, 2, True)},
    2: {"z0_parts": (1, 0, True), "z3": (3, 3, True), "z2_parts": (2, 2, True), "padded_z3": (1, 3, False)}
    | {"shared_z0": (6, 0, True), "shared_z2_padded": (2, 2, False), "shared_z3": (2, 3, True)},
}
JOINT = {
    1: {"joint": (2, 0, True), "joint_padded": (6, 2, False), "joint_z3": (2, 3, True)},
    2: {"joint_z3": (1, 3, True), "joint_z2": (2, 2, True), "joint_z1": (3, 1, False), "joint_z0": (2, 0, True)}
    | {"shared_joint_z0": (6, 0, True), "shared_joint_z1": (2, 1, False), "shared_joint_z3": (2, 3, True)},
}
ORDINARY = {1: ("z3_parts", "padded", "joint"), 2: ("z0_parts", "z3", "joint_z3", "shared_z3", "shared_joint_z3")}


def main(models: Path, out: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from tests.support.shared_rows import sharing_rows
    from training.utils.engine.ranks.startup import started_process_group

    with started_process_group() as ranks:
        size = ranks.world_size
        names = (*CASES[size], *JOINT[size]) if is_long else ORDINARY[size]
        shared = sharing_rows(ranks, size)
        report({name: run_case(name, models, out, shared if "shared" in name else ranks) for name in names})


def run_case(name: str, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    import torch

    from tests.invariants.engine_program import Case

    detach = name in CASES[ranks.world_size]
    micro, stage, packed = (CASES if detach else JOINT)[ranks.world_size][name]
    case = Case(name, zero_stage=stage, micro=micro, packed=packed)
    plain = trained(replace(case, name=f"{name}_plain"), models, out, ranks, 0)[0] if detach else {}
    weights, head, lines, speculated = trained(case, models, out, ranks, DEPTHS, detach)
    if not ranks.is_main:
        return {}
    torch.save(head, out / name / "head.pt")
    torch.save(weights, out / name / "model.pt")
    moved = max((float((weights[key].double() - plain[key].double()).abs().max()) for key in plain), default=-1.0)
    steps = [line for line in lines if "train/mtp_loss" in line]
    return {
        "losses": [line["train/mtp_loss"] for line in steps],
        "acceptances": [line["train/mtp_acceptance_1"] for line in steps],
        "norms": [line.get("train/mtp_grad_norm" if detach else "train/grad_norm") for line in steps],
        "evaluated": [line["eval/mtp_loss"] for line in lines if "eval/mtp_loss" in line],
        "policy_moved": moved,
        "speculated": speculated,
    }


def trained(
    case: Any, models: Path, out: Path, ranks: Any, layers: int, detach: bool = True
) -> tuple[Any, Any, list[dict[str, Any]], Any]:
    """(the policy's weights, the head's, the lines of the metrics, what `speculated` gives of a head beside the model);
    the first two on rank 0 alone."""
    import json

    from tests.invariants.engine_program import LONGEST, PAD, SEED, STEPS, make_engine, rows_of
    from tests.support.data_flags import data_flags
    from threestep.plugins.mtp.feature import HeadFeature
    from threestep.plugins.mtp.settings import MtpSettings
    from training.step1_sft.trainer import SftTrainer
    from training.utils.engine.config.arguments import EngineArguments
    from training.utils.run.metrics import MetricsWriter
    from training.utils.run.run_arguments import RunArguments
    from training.utils.run.trackers import LogArguments
    from training.utils.setup.guests import GuestFeatures
    from training.utils.setup.one_model_run import loop_settings
    from training.utils.setup.training_run import TrainingRun

    settings, path = GuestFeatures([HeadFeature(MtpSettings(layers, COEF, detach=detach))]), str(models / case.model)
    engine, model = make_engine(
        case, models, ranks, lambda model: settings.inside(path, model, case.zero_stage, HEAD_SEED, ranks=ranks)
    )
    train_rows, eval_rows = rows_of("sft", "plain", case.per_step)
    engine_flags = EngineArguments(
        per_device_train_batch_size=case.micro, per_device_eval_batch_size=2, report_mfu=False
    )
    data, reporting = data_flags(max_seq_len=LONGEST), LogArguments()
    run = RunArguments(seed=SEED)
    flags: Any = SimpleNamespace(run=run, engine=engine_flags, data=data, reporting=reporting, guests=settings)
    loop = loop_settings(flags, (STEPS, case.per_step), model, case.packed, ranks=ranks, pad_token_id=PAD)
    loop = replace(loop, eval_interval=0)
    [guests] = settings.open([(engine, model)], path, STEPS, HEAD_SEED)
    folder = out / case.name
    with MetricsWriter(folder, ranks.is_main) as metrics:
        SftTrainer(TrainingRun(engine, train_rows, eval_rows, loop, metrics, guests=guests)).train()
    weights = engine.full_state(model)
    mtp = guests[0].head if guests else None
    head = mtp.engine.full_state(mtp.module) if mtp else {}
    lines = (folder / "metrics.jsonl").read_text().splitlines() if ranks.is_main else []
    rolled = speculated(engine, model, guests, ranks) if guests and detach else None
    return weights, head, [json.loads(line) for line in lines], rolled


def speculated(engine: Any, model: Any, guests: Any, ranks: Any) -> Any:
    """Every rank draws responses to its own prompts with the trained head, then without."""
    import torch

    from tests.invariants.engine_program import END, PAD
    from threestep.plugins.speculation.guessing import Guessing
    from threestep.plugins.speculation.settings import Speculation
    from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
    from training.utils.engine.ranks.collectives import gathered
    from training.utils.engine.whole_model import WholeModel
    from training.utils.generation.decoding.hf import TransformersRollout

    by_guesses, plain = TransformersRollout(), TransformersRollout()
    by_guesses.draw_by(Guessing(Speculation(1), guests.lent_guesser(model, HEAD_SEED), print))
    ids_BP = torch.randint(3, 60, (4, 6), generator=torch.Generator().manual_seed(ranks.rank))
    sampling = Sampling(12, 0.5, 0, 1.0, END, PAD)
    request = RolloutRequest(ids_BP, torch.ones_like(ids_BP).bool(), sampling, range(8), 2)
    found = []
    for each in (by_guesses, plain):
        with each.lent(WholeModel(engine, model)) as lent:
            rollout = each.roll_out(lent, request)
        found.append([rollout.response_of(row).tolist() for row in range(8)])
    return gathered([*found, by_guesses.figures()["rollout/tokens_per_forward"]])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["long"])
