"""SFT, DPO and reward models on rows with images equal plain PyTorch in float64 on one row at a time: losses, gradient
norms and weights, of several families, frozen and not, packed and padded, through adapters, under ZeRO 0 to 3, also
where one rank has no image."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.invariants import images_program, plain
from tests.invariants.conftest import LAUNCH_SECONDS
from tests.invariants.images_program import BETA, CASES, LORA_ALPHA, LORA_DIM, ORDINARY, PER_STEP, SEED, STEPS, Case
from tests.invariants.test_engine_exact import assert_weights_equal, loaded
from tests.support.vision_models import FAMILIES, Family, PlainScorer, awake
from training.utils.data.rows.documents import responses_document, sentence_document
from training.utils.data.rows.phases import ResponsesRow, SentenceRow
from training.utils.layout.documents import unshared
from training.utils.models.scalar_class import scalar_model_class
from training.utils.run.seeds import seed_everything

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine

EVERY = [
    pytest.param(size, name, marks=[] if name in ORDINARY[size] else [pytest.mark.long])
    for size in (1, 2)
    for name in CASES[size]
]
# Of each family, what of the tower's names is the projector.
PROJECTOR = ("merger", "multi_modal_projector", "connector")


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    """run(world_size) -> (its folder, the ranks' reports), each launched once."""
    models, form = tmp_path_factory.mktemp("vision_models"), request.config.getoption("--long")
    for name in {case.family for size in (1, 2) for case in CASES[size].values()}:
        family = family_of(name)
        family.model.float().save_pretrained(models / name)
        config = family.model.config
        config.num_labels = 1
        scalar = scalar_model_class(config).from_config(config, dtype=torch.float32)
        scalar.load_state_dict(PlainScorer(family).state_dict())
        scalar.save_pretrained(models / f"{name}_scalar")

    @cache
    def launch(size: int) -> tuple[Path, list[dict[str, Any]]]:
        out = tmp_path_factory.mktemp(f"images_{size}")
        arguments = [models, out, *(["long"] if form else [])]
        return out, run_ranks(Path(images_program.__file__), size, arguments, LAUNCH_SECONDS)

    launch.models = models
    return launch


def family_of(name: str) -> Family:
    family = awake(FAMILIES[name]())
    family.model.float().double()  # as it is read from a file
    return family


@cache
def trained_plainly(case: Case, models: Path) -> tuple[plain.Trained, torch.nn.Module]:
    """What one row at a time gives, with adapters merged, and the model at the start."""
    family = family_of(case.family)
    start = family_of(case.family)
    model, before = (
        part.model if case.kind != "reward" else PlainScorer(part).float().double() for part in (family, start)
    )
    if case.lora_dim:
        model = family.model = adapted(case, family, models)
    for name, weight in model.named_parameters():
        if case.lora_dim:
            break
        is_text = name.startswith(("model.language_model.", "model.text_model.", "lm_head.", "score."))
        is_projector = any(part in name for part in PROJECTOR)
        frozen = case.freeze_projector if is_projector else case.freeze_vision_tower
        weight.requires_grad_(is_text or not frozen)

    losses = {"sft": sft_loss, "reward": reward_loss, "dpo": partial(dpo_loss, reference=start)}
    rows = images_program.rows_of(family) if case.kind == "sft" else images_program.pairs_of(family)
    batches = plain.batches_of(rows, PER_STEP, SEED)
    trained = plain.train(model, batches, partial(losses[case.kind], family), plain.Recipe(total_steps=STEPS))
    return (replace(trained, weights=merged(before, trained.weights)) if case.lora_dim else trained), before


def adapted(case: Case, family: Family, models: Path) -> torch.nn.Module:
    """The start model with the adapters that a run draws, which alone train, and a scalar head."""
    seed_everything(SEED, rank=0)
    model = images_program.load(case, models, torch.float32, None).double().eval()
    of_tower = [name for name, weight in model.named_parameters() if weight.requires_grad and ".visual." in name]
    assert not of_tower, of_tower
    return model


def merged(start: torch.nn.Module, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of `start` that trained, by adapters or themselves."""
    weights = {}
    for name, weight in start.named_parameters():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in trained:
            down, up = (trained[f"{layer}.lora_{side}.default.weight"] for side in "AB")
            weights[name] = weight.detach() + up @ down * LORA_ALPHA / LORA_DIM
        elif name in trained:
            weights[name] = trained[name]
    assert len(weights) > 10
    return weights


def sft_loss(family: Family, model: torch.nn.Module, batch: list[SentenceRow]) -> torch.Tensor:
    return -torch.cat([family.own_logprobs(sentence_document(row)) for row in batch]).mean()


def reward_loss(family: Family, model: torch.nn.Module, batch: list[ResponsesRow]) -> torch.Tensor:
    """The mean over prompts of -log sigmoid(score of the chosen - score of the rejected)."""
    losses = []
    for row in batch:
        chosen, rejected = (
            model.score(model.model(**family.own_inputs(one.segments[0].tokens))[0][0, -1])
            for one in unshared(responses_document(row, are_targets=False))
        )
        losses.append(-torch.nn.functional.logsigmoid(chosen - rejected))
    return torch.stack(losses).mean()


def dpo_loss(family: Family, model: torch.nn.Module, batch: list[ResponsesRow], reference: Family) -> torch.Tensor:
    """The mean over prompts of -log sigmoid(beta (ratio of the chosen - ratio of the rejected))."""
    losses = []
    for row in batch:
        chosen, rejected = unshared(responses_document(row, are_targets=True))
        with torch.no_grad():
            before = reference.own_logprobs(chosen).sum() - reference.own_logprobs(rejected).sum()
        now = family.own_logprobs(chosen).sum() - family.own_logprobs(rejected).sum()
        losses.append(-torch.nn.functional.logsigmoid(BETA * (now - before)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("size, name", EVERY)
def test_a_run_equals_plain_pytorch(run, size, name):
    case = CASES[size][name]
    out, reports = run(size)
    want, start = trained_plainly(case, run.models)
    got = reports[0][name]
    assert got["losses"] == pytest.approx(want.losses, abs=2e-5)
    if case.zero_stage:
        assert got["norms"] == pytest.approx(want.norms, rel=2e-5)
    weights = loaded(out / name)
    assert_weights_equal(weights, want.weights, start, 1e-3, along=1e-4)
    frozen = dict(start.named_parameters()).keys() - want.weights.keys()
    assert len(frozen) > 5 or not case.freeze_vision_tower
    for weight in frozen:
        assert torch.equal(weights[weight], dict(start.named_parameters())[weight].float()), weight


def test_a_rank_without_images_gets_one_where_the_other_has_some(run):
    """Else these runs would be of no use: the ranks would gather other weights."""
    _, reports = run(2)
    for name in ORDINARY[2]:
        assert sum(report[name]["lacking"] for report in reports) > 0, name
