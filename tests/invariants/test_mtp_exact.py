"""A head for multi-token prediction trained by the engine equals plain PyTorch in float64, one sequence at a time, by
DeepSeek-V3's equations; the model beside it is that of a run without a head, to the bit. Trained by one loss
(--mtp_detach false), head and model are both plain PyTorch's."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.invariants import engine_program, mtp_program, plain
from tests.invariants.test_engine_exact import start_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


def cases_of(table: Any) -> list[Any]:
    return [
        pytest.param(size, case, marks=[] if case in mtp_program.ORDINARY[size] else [pytest.mark.long])
        for size in (1, 2)
        for case in table[size]
    ]


def head_of(folder: Path) -> Any:
    """The head that the programs begin with, in float64."""
    from threestep.plugins.mtp.head import block_weights, new_head
    from training.utils.base.seeds import derived_seed

    model: Any = start_of(folder, "sft", torch.float32)
    head = new_head(model, mtp_program.DEPTHS, derived_seed(mtp_program.HEAD_SEED, "mtp"))
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
    import copy

    recipe = plain.Recipe()
    model: Any = copy.deepcopy(start_of(folder, "sft"))
    head = head_of(folder)
    means: list[float] = []

    def loss_of_both(both: Any, batch: list) -> torch.Tensor:
        parts = losses_of_depths(both["model"], both["head"], batch)
        means.append(float(sum(parts)) / len(parts))
        return mtp_program.COEF * sum(parts) / len(parts)

    train_rows, _ = engine_program.rows_of("sft", "plain", engine_program.PER_STEP)
    batches = plain.batches_of(train_rows, engine_program.PER_STEP, engine_program.SEED)
    # Two optimizers: the model learns from its own loss, the head beside it.
    norms, optimizers = [], {}
    for name, module in (("model", model), ("head", head)):
        parameters = list(module.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizers[name] = (parameters, torch.optim.AdamW(groups, lr=1.0, betas=recipe.betas, foreach=False))
    for step, batch in enumerate(batches):
        head_loss, own_loss = loss_of_both({"model": model, "head": head}, batch), plain.sft_loss(model, batch)
        for name, loss in (("head", head_loss), ("model", own_loss)):
            parameters, optimizer = optimizers[name]
            optimizer.zero_grad()
            loss.backward()
            norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))
            for parameter in parameters:
                parameter.grad.mul_(min(1.0, recipe.max_grad_norm / norm))
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.step()
            if name == "head":
                norms.append(norm)
    return means, norms, {name: weight.detach() for name, weight in head.named_parameters()}


@pytest.mark.parametrize("world_size, case", cases_of(mtp_program.CASES))
def test_the_head_is_that_of_plain_pytorch_and_the_model_that_of_a_run_without(launched, models, world_size, case):
    out, reports = launched("mtp_program", world_size)
    found = reports[0][case]
    assert found["policy_moved"] == 0.0
    losses, norms, weights = trained_plainly(models / "causal")
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    if mtp_program.CASES[world_size][case][1]:  # DeepSpeed keeps none at stage 0
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
    assert residual(head_of(models / "causal"), torch.load(out / case / "head.pt"), weights) < 2e-5
    assert 0.0 <= min(found["acceptances"]) and len(found["evaluated"]) == 2
    assert len(found["speculated"]) == world_size
    for by_guesses, without, tokens_a_forward in found["speculated"]:
        assert by_guesses == without and tokens_a_forward >= 1


def residual(start: Any, got: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> float:
    """How far `got` is from `weights`, beside how far these are from the module `start`."""
    begun = dict(start.named_parameters())
    update = torch.cat([(weights[name] - begun[name].detach()).flatten() for name in weights])
    missed = torch.cat([(got[name].double() - weights[name]).flatten() for name in weights])
    return float(missed.norm() / update.norm())


@cache
def trained_jointly(folder: Path) -> tuple[list[float], plain.Trained]:
    """Mean losses of the head, and all of the training of both by one loss and one optimizer."""
    import copy

    both = torch.nn.ModuleDict({"model": copy.deepcopy(start_of(folder, "sft")), "head": head_of(folder)})
    means: list[float] = []

    def loss_of(modules: Any, batch: list) -> torch.Tensor:
        parts = losses_of_depths(modules["model"], modules["head"], batch, joint=True)
        means.append(float(sum(parts)) / len(parts))
        return plain.sft_loss(modules["model"], batch) + mtp_program.COEF * sum(parts) / len(parts)

    train_rows, _ = engine_program.rows_of("sft", "plain", engine_program.PER_STEP)
    batches = plain.batches_of(train_rows, engine_program.PER_STEP, engine_program.SEED)
    return means, plain.train(both, batches, loss_of, plain.Recipe())


@pytest.mark.parametrize("world_size, case", cases_of(mtp_program.JOINT))
def test_head_and_model_by_one_loss_are_those_of_plain_pytorch(launched, models, world_size, case):
    out, reports = launched("mtp_program", world_size)
    found = reports[0][case]
    losses, expected = trained_jointly(models / "causal")
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    if mtp_program.JOINT[world_size][case][1]:  # DeepSpeed keeps none at stage 0
        assert found["norms"] == pytest.approx(expected.norms, rel=1e-5)
    for part, start in (("model", start_of(models / "causal", "sft")), ("head", head_of(models / "causal"))):
        weights = {
            name.removeprefix(f"{part}."): weight for name, weight in expected.weights.items() if name.startswith(part)
        }
        assert residual(start, torch.load(out / case / f"{part}.pt"), weights) < 2e-5, part
