"""A head for multi-token prediction trained by the engine equals plain PyTorch in float64, one sequence at a time, by
DeepSeek-V3's equations; the model beside it is that of a run without a head, to the bit. Trained by one loss
(--mtp_detach false), head and model are both plain PyTorch's."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.invariants import plain
from tests.invariants.engine_program import (
    END,
    PAD,
    PER_STEP,
    SEED,
    Case,
    column,
    make_engine,
    rows_of,
    trained,
)
from tests.invariants.launched import each_case
from tests.invariants.test_engine_exact import start_of
from tests.support.shared_rows import sharing_rows
from threestep.plugins.mtp.feature import HeadFeature
from threestep.plugins.mtp.head import block_weights, new_head
from threestep.plugins.mtp.settings import MtpSettings
from threestep.plugins.speculation.guessing import Guessing
from threestep.plugins.speculation.settings import Speculation
from training.utils.base.seeds import derived_seed
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.engine.ranks.collectives import gathered
from training.utils.engine.whole_model import WholeModel
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.setup.guests import GuestFeatures

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


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    """Train SFT with a head for multi-token prediction, and without one.

    policy_moved: the largest difference of the policy's weights from those of the same run without a head, if the head
    is trained beside it. speculated: of each rank, its rollout by the head's guesses, that without, and the tokens a
    forward."""
    size = ranks.world_size
    names = (*CASES[size], *JOINT[size]) if is_long else ORDINARY[size]
    shared = sharing_rows(ranks, size)
    return {name: run_case(name, models, out, shared if "shared" in name else ranks) for name in names}


def run_case(name: str, models: Path, out: Path, ranks: Any) -> dict[str, Any]:
    detach = name in CASES[ranks.world_size]
    micro, stage, packed = (CASES if detach else JOINT)[ranks.world_size][name]
    case = Case(name, zero_stage=stage, micro=micro, packed=packed)
    alone = with_head(replace(case, name=f"{name}_plain"), models, out, ranks, 0)[0] if detach else {}
    weights, head, lines, speculated = with_head(case, models, out, ranks, DEPTHS, detach)
    if not ranks.is_main:
        return {}
    torch.save(head, out / name / "head.pt")
    torch.save(weights, out / name / "model.pt")
    moved = max((float((weights[key].double() - alone[key].double()).abs().max()) for key in alone), default=-1.0)
    steps = [line for line in lines if "train/mtp_loss" in line]
    return {
        "losses": column(steps, "train/mtp_loss"),
        "acceptances": column(steps, "train/mtp_acceptance_1"),
        "norms": [line.get("train/mtp_grad_norm" if detach else "train/grad_norm") for line in steps],
        "evaluated": column(lines, "eval/mtp_loss"),
        "policy_moved": moved,
        "speculated": speculated,
    }


def with_head(
    case: Any, models: Path, out: Path, ranks: Any, layers: int, detach: bool = True
) -> tuple[Any, Any, list[dict[str, Any]], Any]:
    """(the policy's weights, the head's, the lines of the metrics, what `speculated` gives of a head beside the model);
    the first two on rank 0 alone."""
    settings, path = GuestFeatures([HeadFeature(MtpSettings(layers, COEF, detach=detach))]), str(models / case.model)
    engine, model = make_engine(
        case, models, ranks, lambda model: settings.inside(path, model, case.zero_stage, HEAD_SEED, ranks=ranks)
    )
    lines, guests = trained(case, engine, model, out / case.name, ranks, settings, path, HEAD_SEED)
    weights = engine.full_state(model)
    mtp = guests[0].head if guests else None
    head = mtp.engine.full_state(mtp.module) if mtp else {}
    rolled = speculated(engine, model, guests, ranks) if guests and detach else None
    return weights, head, lines, rolled


def speculated(engine: Any, model: Any, guests: Any, ranks: Any) -> Any:
    """Every rank draws responses to its own prompts with the trained head, then without."""
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


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


def head_of(folder: Path) -> Any:
    """The head that the programs begin with, in float64."""
    model: Any = start_of(folder, "sft", torch.float32)
    head = new_head(model, DEPTHS, derived_seed(HEAD_SEED, "mtp"))
    theirs, weights = block_weights(model, head), dict(model.named_parameters())
    with torch.no_grad():
        for module in head.depths:
            for name, weight in module.trunk.named_parameters():
                weight.copy_(weights[theirs[name]])
    return head.double()


def losses_of_depths(model: Any, head: Any, batch: list, joint: bool = False) -> list[torch.Tensor]:
    """Mean negative log-likelihood of each depth over the batch's targets. With h the states of depth k - 1, entry i
    joins h_i with the embedding of token i + k and predicts token i + k + 1, if that is a target. joint: with gradients
    to states, embeddings and output layer."""
    totals, counts = [torch.zeros((), dtype=torch.float64)] * len(head.depths), [0] * len(head.depths)
    for row in batch:
        ids_T = torch.tensor(row.input_ids)
        with torch.set_grad_enabled(joint):
            states_TH = model.base_model(input_ids=ids_T.unsqueeze(0))[0][0]
            embeddings_TH = model.get_input_embeddings()(ids_T)
        for k, module in enumerate(head.depths, start=1):
            count = len(ids_T) - k
            if count < 1:
                break
            joined = torch.cat([module.enorm(embeddings_TH[k:]), module.hnorm(states_TH[:count])], dim=-1)
            entries, positions = module.eh_proj(joined).unsqueeze(0), torch.arange(k, len(ids_T)).unsqueeze(0)
            states_TH = module.trunk(inputs_embeds=entries, position_ids=positions, use_cache=False)[0][0]
            weight_VH = model.get_output_embeddings().weight
            logits = functional.linear(states_TH, weight_VH if joint else weight_VH.detach())
            logprobs = torch.log_softmax(logits, dim=-1)
            targets = [place for place in range(k + 1, len(ids_T)) if row.loss_mask[place]]
            for place in targets:
                totals[k - 1] = totals[k - 1] - logprobs[place - k - 1, ids_T[place]]
            counts[k - 1] += len(targets)
    return [total / count for total, count in zip(totals, counts, strict=True)]


@cache
def trained_plainly(folder: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Mean losses of the steps, gradient norms, the head's weights; of the model at the start of each step."""
    recipe, model = plain.Recipe(), copy.deepcopy(start_of(folder, "sft"))
    head = head_of(folder)
    means, norms = [], []
    # Two optimizers: the model learns from its own loss, the head beside it.
    beside, own = (
        plain.Stepper(dict(each.named_parameters()), recipe.weight_decay, recipe.max_grad_norm)
        for each in (head, model)
    )
    for step, batch in enumerate(batches()):
        model.zero_grad(), head.zero_grad()
        parts = losses_of_depths(model, head, batch)
        means.append(float(sum(parts)) / len(parts))
        (COEF * sum(parts) / len(parts)).backward()
        plain.sft_loss(model, batch).backward()
        norms.append(beside.step(recipe.rate(step)))
        own.step(recipe.rate(step))
    return means, norms, {name: weight.detach() for name, weight in head.named_parameters()}


def batches() -> list[list]:
    return plain.batches_of(rows_of("sft", "plain", PER_STEP)[0], PER_STEP, SEED)


@pytest.mark.parametrize("world_size, case", each_case(CASES, ORDINARY))
def test_the_head_is_that_of_plain_pytorch_and_the_model_that_of_a_run_without(launched, models, world_size, case):
    out, reports = launched("test_mtp_exact", world_size)
    found = reports[0][case]
    assert found["policy_moved"] == 0.0
    losses, norms, weights = trained_plainly(models / "causal")
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    if CASES[world_size][case][1]:  # DeepSpeed keeps none at stage 0
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
    assert plain.residual(torch.load(out / case / "head.pt"), weights, head_of(models / "causal")) < 2e-5
    assert 0.0 <= min(found["acceptances"]) and len(found["evaluated"]) == 2
    assert len(found["speculated"]) == world_size
    for by_guesses, without, tokens_a_forward in found["speculated"]:
        assert by_guesses == without and tokens_a_forward >= 1


@cache
def trained_jointly(folder: Path) -> tuple[list[float], plain.Trained]:
    """Mean losses of the head, and all of the training of both by one loss and one optimizer."""
    both = torch.nn.ModuleDict({"model": copy.deepcopy(start_of(folder, "sft")), "head": head_of(folder)})
    means: list[float] = []

    def loss_of(modules: Any, batch: list) -> torch.Tensor:
        parts = losses_of_depths(modules["model"], modules["head"], batch, joint=True)
        means.append(float(sum(parts)) / len(parts))
        return plain.sft_loss(modules["model"], batch) + COEF * sum(parts) / len(parts)

    return means, plain.train(both, batches(), loss_of, plain.Recipe())


@pytest.mark.parametrize("world_size, case", each_case(JOINT, ORDINARY))
def test_head_and_model_by_one_loss_are_those_of_plain_pytorch(launched, models, world_size, case):
    out, reports = launched("test_mtp_exact", world_size)
    found = reports[0][case]
    losses, expected = trained_jointly(models / "causal")
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    if JOINT[world_size][case][1]:  # DeepSpeed keeps none at stage 0
        assert found["norms"] == pytest.approx(expected.norms, rel=1e-5)
    for part, start in (("model", start_of(models / "causal", "sft")), ("head", head_of(models / "causal"))):
        weights = {
            name.removeprefix(f"{part}."): weight for name, weight in expected.weights.items() if name.startswith(part)
        }
        assert plain.residual(torch.load(out / case / f"{part}.pt"), weights, start) < 2e-5, part
