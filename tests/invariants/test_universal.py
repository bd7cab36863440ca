"""What an engine keeps goes from any ZeRO stage to any other unchanged: float32 weights, Adam's moments and count, and
each parameter group's own learning rate and decay."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.invariants import engine_program, tiny
from tests.invariants.engine_program import PAD, STEPS
from tests.invariants.launched import each_case
from threestep.plugins.mtp.layout.entries import mtp_entries
from threestep.plugins.mtp.opening import open_head
from threestep.plugins.mtp.settings import MtpSettings
from threestep.plugins.other_ranks import universal
from training.utils.data.rows.documents import sentence_document
from training.utils.engine.checkpoint_files import read_state
from training.utils.engine.ranks.collectives import barrier
from training.utils.layout.rows import packed_rows

# name: the stages one after the other, dtype, rank of LoRA
CASES = {
    "fp32": ((0, 2, 3, 1, 0), "fp32", 0),
    "bf16": ((2, 0, 3), "bf16", 0),
    "lora": ((3, 2, 0), "fp32", 4),
    "not_stepped": ((1, 3), "bf16", 0),
    "mtp_head": ((0, 3, 2), "bf16", 0),  # a head's engine, beside a model's
    "not_stepped_3": ((3, 2, 3), "bf16", 0),
    "every_pair": ((0, 2, 3, 0, 1, 3, 2, 1, 0, 3, 1, 2, 0), "fp32", 0),
}
LONG = ("every_pair",)
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    """Carry an engine's state from ZeRO stage to ZeRO stage; return {case: {"from to": what changed}}. On the way torch
    unpickles nothing: that would end the program."""

    def refuse(*arguments: Any, **others: Any) -> None:
        raise AssertionError("a file is unpickled, or pickled")

    torch.load = torch.save = refuse
    return {name: carried(name, models, out / name, ranks) for name in CASES if is_long or name not in LONG}


def carried(name: str, models: Path, place: Path, ranks: Any) -> dict[str, dict[str, float]]:
    """For each step of the chain: `changed`, the largest difference between the tensors that were converted first and
    those that are converted now, `weights`, that between them and the model's; `step`, what Adam has counted, and
    `counted`, what every part of its state has after one step more."""
    stages, dtype, lora_dim = CASES[name]
    told: dict[str, dict[str, float]] = {}
    first: dict[str, Any] = {}
    for number, (before, stage) in enumerate(pairwise((None, *stages))):
        case = engine_program.Case(name, zero_stage=stage, dtype=dtype, lora_dim=lora_dim)
        engine, model = engine_program.make_engine(case, models, ranks)
        take_step = model_step
        if name == "mtp_head":
            engine, model = head_beside(engine, model, models / case.model)
            take_step = head_step
        here = place / str(number)
        if before is None:
            for step in range(0 if name.startswith("not_stepped") else 3):
                take_step(engine, step, ranks)
        else:
            universal.load(engine, place / str(number - 1) / "universal", "model")
        groups = universal._adam(engine).param_groups
        now = {"rates": [group["lr"] for group in groups], "decays": [group["weight_decay"] for group in groups]}
        engine.engine.save_checkpoint(str(here), tag="model", save_latest=False)
        weights = engine.full_state(model)
        barrier()
        take_step(engine, 3, ranks)
        counted = {float(state["step"]) for state in universal._adam(engine).state.values()}
        if ranks.is_main:
            universal.convert(here / "model", here / "universal" / "model", engine)
            found = tensors(here / "universal" / "model")
            if before is None:
                first = {**found, "groups": now}
            told[f"{before} to {stage}"] = {
                "changed": max(float((found[key] - first[key]).abs().max()) for key in found),
                "same_names": float({*found, "groups"} == {*first}),
                "same_groups": float(now == first["groups"]),
                "step": float(found[next(key for key in found if key.endswith("/step"))]),
                "counted": max(counted) if len(counted) == 1 else -1.0,
                "moved": max(float(found[key].abs().max()) for key in found if key.endswith("/exp_avg")),
                "weights": largest_difference(found, weights) if lora_dim == 0 else 0.0,
            }
        barrier()
    return told


def model_step(engine: Any, number: int, ranks: Any) -> None:
    engine.backward(-engine(engine_program._laid(sentences_of(number, ranks))).logprobs_M.sum() / 100)
    engine.step()


def head_beside(engine: Any, model: Any, folder: Path) -> tuple[Any, Any]:
    """(the engine of a new head of one module, the head)."""
    mtp = open_head(MtpSettings(1), str(folder), engine, model, total_steps=STEPS, seed=7)
    assert mtp is not None
    return mtp.head.engine, mtp.head.engine.module


def head_step(engine: Any, number: int, ranks: Any) -> None:
    """A step on states and embeddings that are drawn: what a model would give them does not matter."""
    documents = [sentence_document(row) for row in sentences_of(number, ranks)]
    rows = packed_rows([[document] for document in documents], PAD, with_before=True)
    size = engine.module.depths[0].eh_proj.out_features
    generator = torch.Generator().manual_seed(10 * number + ranks.rank)
    shape = (2, rows.input_ids_NT.numel(), size)
    hidden_LH, embeddings_LH = torch.randn(shape, generator=generator).to(torch.bfloat16)
    (states_MH,) = engine(hidden_LH, embeddings_LH, mtp_entries(rows, 1))
    engine.backward(states_MH.float().square().sum() / 100)
    engine.step()


def sentences_of(number: int, ranks: Any) -> list[Any]:
    return tiny.sentences(4 * 6, seed=1)[number * 6 : (number + 1) * 6][ranks.rank :: ranks.world_size]


def largest_difference(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> float:
    """Between the converted float32 weights, rounded to the model's dtype, and those that the model computes with."""
    pairs = [(found[key], weight) for name, weight in weights.items() for key in found if key.endswith(f"{name}/fp32")]
    assert pairs
    return max(float((master.to(weight.dtype) - weight).abs().max()) for master, weight in pairs)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("zero/**/step.pt")):  # DeepSpeed adds weights that are not trained, without one
        name = path.parent.relative_to(folder / "zero").as_posix()
        found[f"{name}/step"] = torch.as_tensor(read_state(path)).float()
        for key in STATES:
            found[f"{name}/{key}"] = read_state(path.parent / f"{key}.pt")["param"].detach().float()
    return found


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


@pytest.mark.parametrize("world_size, case", each_case({2: CASES}, {2: CASES.keys() - set(LONG)}))
def test_nothing_changes_on_the_way(launched, world_size, case):
    found = launched("test_universal", world_size)[1][0][case]
    assert len(found) == len(CASES[case][0])
    stepped = not case.startswith("not_stepped")
    for where, told in found.items():
        assert (told["changed"], told["weights"]) == (0.0, 0.0), where
        assert told["same_names"] and told["same_groups"], where
        assert told["counted"] == told["step"] + 1.0, where
        assert told["step"] == 3.0 * stepped and (told["moved"] > 0.0) == stepped, where
