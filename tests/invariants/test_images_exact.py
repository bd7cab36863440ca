"""SFT, DPO, reward models and step 3 on rows with images equal plain PyTorch in float64 on one row at a time: losses,
gradient norms and weights, of several families, frozen and not, packed and padded, through adapters, under ZeRO 0 to 3,
also where one rank has no image, and with each row over two ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.invariants import images_program, plain, plain_ppo, ppo_program
from tests.invariants.images_program import BETA, CASES, LORA_ALPHA, LORA_DIM, ORDINARY, PER_STEP, SEED, STEPS, Case
from tests.invariants.launched import each_case
from tests.invariants.test_engine_exact import assert_weights_equal, loaded
from tests.support import plain_losses
from tests.support.vision_models import FAMILIES, Family, PlainScorer, awake
from training.utils.base.seeds import seed_everything
from training.utils.contracts.documents import Document, join, unshared
from training.utils.contracts.documents import plain as plain_document
from training.utils.contracts.rows import MarkedRow, PromptRow, ResponsesRow, SentenceRow
from training.utils.data.rows.documents import responses_document, sentence_document
from training.utils.models.families import scalar_model_class
from training.utils.preference.batches import MismatchedRows

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2400)]  # the long form on a busy machine

EVERY = each_case({size: [name for name in CASES[size] if not CASES[size][name].is_step3] for size in CASES}, ORDINARY)
OF_STEP3 = each_case({size: [name for name in CASES[size] if CASES[size][name].is_step3] for size in CASES}, ORDINARY)
Parts = list[torch.Tensor]
# Of each family, what of the tower's names is the projector.
PROJECTOR = ("merger", "multi_modal_projector", "image_newline", "connector")


@pytest.fixture(scope="module")
def run(request, tmp_path_factory, launched):
    """run(world_size) -> (its folder, the ranks' reports), each launched once, with the cases that are asked for."""
    models, asked = tmp_path_factory.mktemp("vision_models"), asked_cases(request)
    for name in {CASES[size][name].family for size, names in asked.items() for name in names}:
        family = family_of(name)
        family.model.float().save_pretrained(models / name)
        config = family.model.config
        config.num_labels = 1
        scalar = scalar_model_class(config).from_config(config, dtype=torch.float32)
        scalar.load_state_dict(PlainScorer(family).state_dict())
        scalar.save_pretrained(models / f"{name}_scalar")

    def launch(size: int) -> tuple[Path, list[dict[str, Any]]]:
        return launched("images_program", size, folder=str(models), names=asked[size])

    launch.models = models
    return launch


def asked_cases(request: pytest.FixtureRequest) -> dict[int, list[str]]:
    """The cases of this session's tests, by the number of ranks, and the ordinary ones."""
    asked = {size: dict.fromkeys(names) for size, names in ORDINARY.items()}
    for item in request.session.items:
        case = item.callspec.params if item.path == request.path and hasattr(item, "callspec") else {}
        if "size" in case:
            asked[case["size"]][case["name"]] = None
    return {size: list(names) for size, names in asked.items()}


def family_of(name: str) -> Family:
    family = awake(FAMILIES[name]())
    family.model.float().double()  # as it is read from a file
    return family


def freeze(model: torch.nn.Module, case: Case) -> None:
    """What the flags of a run freeze."""
    for name, weight in model.named_parameters():
        is_text = name.startswith(("model.language_model.", "model.text_model.", "lm_head.", "score."))
        is_projector = any(part in name for part in PROJECTOR)
        frozen = case.freeze_projector if is_projector else case.freeze_vision_tower
        weight.requires_grad_(is_text or not frozen)


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
    else:
        freeze(model, case)
    losses = {"sft": sft_loss, "reward": reward_loss, "dpo": partial(dpo_loss, reference=start)}
    rows = images_program.rows_of(family) if case.kind == "sft" else images_program.pairs_of(family)
    if case.kind == "kto":
        rows = images_program.marked_of(family)
        losses["kto"] = partial(kto_loss, reference=start, others=MismatchedRows(rows, images_program.LONGEST))
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


def kto_loss(
    family: Family, model: torch.nn.Module, batch: list[MarkedRow], reference: Family, *, others: Any
) -> torch.Tensor:
    """The mean over rows of 1 - sigmoid(+-beta (ratio - z)), z the mean ratio of the batch's prompts, with their
    images, and other rows' responses, at least 0."""

    def ratio(row: ResponsesRow) -> torch.Tensor:
        [document] = unshared(responses_document(row, are_targets=True))
        with torch.no_grad():
            before = reference.own_logprobs(document).sum()
        return family.own_logprobs(document).sum() - before

    with torch.no_grad():
        z = torch.stack([ratio(others[row.row_id]) for row in batch]).mean().clamp(min=0.0)
    signed = [BETA * (ratio(row) - z) * (1 if row.is_good else -1) for row in batch]
    return (1.0 - torch.stack(signed).sigmoid()).mean()


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
    for name in {*ORDINARY[2]} - {*images_program.SHARED}:
        assert sum(report[name]["lacking"] for report in reports) > 0, name


def step3_plainly(case: Case, told: list[list[dict[str, Any]]]) -> Step3:
    """What each iteration computes from the responses that were drawn, one sequence at a time.

    The policy's loss is the mean over all tokens of -min(r A, clip(r) A). GRPO: A is of a group's scores, and the loss
    has KL_COEF k3, at most 10. PPO: A is whitened, of scores at the end and a KL at each token; the critic learns."""
    actor, reference, body = (family_of(case.family) for _ in range(3))
    critic, reward = (PlainScorer(family).float().double() for family in (body, family_of(case.family)))
    for model in (actor.model, critic):
        freeze(model, case)
    prompts, steps = images_program.prompts_of(actor), ppo_program.ITERATIONS * ppo_program.EPOCHS
    learners = (
        plain_ppo.Learner(actor.model, ppo_program.ACTOR_RATE, steps),
        plain_ppo.Learner(critic, ppo_program.CRITIC_RATE, steps),
    )
    found = Step3([], [], actor.model, critic)
    for ranks in told:
        pairs = [pair for rank in ranks for pair in rank["pairs"]]
        documents = [sequence_of(prompts[row], ids) for row, ids in pairs]
        with torch.no_grad():
            old, ref = ([each.own_logprobs(one) for one in documents] for each in (actor, reference))
            values = [at_each(critic, body, one)[:-1] for one in documents]
            scores = [images_program.score_of(ids) for _, ids in pairs]
            if case.kind == "ppo":
                most = images_program.CLIP_REWARD
                scores = [min(max(float(at_each(reward, body, one)[-1]), -most), most) for one in documents]
        gains, returns = advantages(case.kind, scores, old, ref, values)
        old_M, ref_M, value_M = (torch.cat(parts) for parts in (old, ref, values))
        sums = dict.fromkeys(("actor/policy_loss", "actor/ratio", "actor/kl_loss", "critic/value_loss"), 0.0)
        for _ in range(ppo_program.EPOCHS):
            now_M = torch.cat([actor.own_logprobs(one) for one in documents])
            ratio_M, gap_M = torch.exp(now_M - old_M), ref_M - now_M
            held_M = ratio_M.clamp(1 - ppo_program.CLIP_RANGE, 1 + ppo_program.CLIP_RANGE)
            policy = -torch.minimum(ratio_M * gains, held_M * gains).mean()
            kl = (gap_M.exp() - gap_M - 1).clamp(max=10.0).mean()
            learners[0].step(policy + ppo_program.KL_COEF * kl if case.kind == "grpo" else policy)
            losses = [policy, ratio_M.mean(), kl]
            if case.kind == "ppo":
                seen_M, far = (
                    torch.cat([at_each(critic, body, one)[:-1] for one in documents]),
                    ppo_program.CLIP_RANGE_VALUE,
                )
                near_M = torch.maximum(torch.minimum(seen_M, value_M + far), value_M - far)
                losses.append(0.5 * torch.maximum((seen_M - returns) ** 2, (near_M - returns) ** 2).mean())
                learners[1].step(losses[-1])
            for name, value in zip(sums, losses, strict=False):
                sums[name] += float(value.detach()) / ppo_program.EPOCHS
        absent = "actor/kl_loss" if case.kind == "ppo" else "critic/value_loss"
        found.figures.append({name: value for name, value in sums.items() if name != absent})
        found.scores.append(scores)
    return found


@dataclass(frozen=True)
class Step3:
    """Of each iteration the scores, in the order of the ranks, and the losses, averaged over its epochs; the models as
    they ended."""

    scores: list[list[float]]
    figures: list[dict[str, float]]
    actor: torch.nn.Module
    critic: torch.nn.Module


def at_each(scorer: torch.nn.Module, body: Family, document: Document) -> torch.Tensor:
    """The scalars in the states that choose the response's tokens, and at its last."""
    tokens = document.segments[0].tokens
    first = int(tokens.is_target.nonzero()[0])
    return scorer.score(scorer.model(**body.own_inputs(tokens))[0][0, first - 1 :]).squeeze(-1)


def advantages(
    kind: str, scores: list[float], old: Parts, ref: Parts, values: Parts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all tokens, with the returns."""
    lengths = torch.tensor([len(part) for part in old])
    if kind == "grpo":
        groups = torch.tensor(scores, dtype=torch.float64).view(-1, images_program.SAMPLES)
        gains = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        return gains.flatten().repeat_interleave(lengths), torch.cat(values)
    gains = []
    for score, mine, theirs, own in zip(scores, old, ref, values, strict=True):
        rewards = [-ppo_program.KL_COEF * float(term) for term in mine - theirs]
        rewards[-1] += score
        rewards_r = torch.tensor(rewards, dtype=torch.float64)
        gains.append(plain_losses.gae(rewards_r, own.double(), ppo_program.GAMMA, ppo_program.LAM))
    all_M = torch.cat(gains)
    return (all_M - all_M.mean()) / all_M.std(), all_M + torch.cat(values)


def sequence_of(row: PromptRow, response: list[int]) -> Document:
    ids = torch.from_numpy(row.flipped_prompt_ids[::-1].astype("int64"))
    return plain_document(replace(join(ids, torch.tensor(response)), media=row.media))


@pytest.mark.parametrize("size, name", OF_STEP3)
def test_step3_equals_plain_pytorch(run, size, name):
    case = CASES[size][name]
    out, reports = run(size)
    told = [list(ranks) for ranks in zip(*(report[name]["iterations"] for report in reports), strict=True)]
    found = step3_plainly(case, told)
    for ranks, want, scores in zip(told, found.figures, found.scores, strict=True):
        assert [score for rank in ranks for score in rank["scores"]] == pytest.approx(scores, abs=1e-4)
        for rank in ranks:
            assert rank["apart"] < 2e-5  # rollout and training forward
            assert len({len(ids) for _, ids in rank["pairs"]}) > 1
            got = {key: rank["figures"][key] for key in want}
            assert got == pytest.approx(want, rel=2e-4, abs=1e-5)
    start = family_of(case.family)
    assert_moved_alike(loaded(out / name), found.actor, start.model, case)
    if case.kind == "ppo":
        assert_moved_alike(loaded(out / name / "critic"), found.critic, PlainScorer(start).float().double(), case)


@pytest.mark.parametrize("size, name", [case for case in OF_STEP3 if CASES[case.values[0]][case.values[1]].kept_mb])
def test_a_frozen_tower_runs_once_for_a_picture_in_step_3(run, size, name):
    """For rollout, policy, reference, critic and reward model, in both epochs of all iterations."""
    _, reports = run(size)
    towers = [report[name]["towers"] for report in reports]
    assert max(towers) <= 4 and sum(towers) >= 4, towers


def assert_moved_alike(got: dict[str, torch.Tensor], want: torch.nn.Module, start: torch.nn.Module, case: Case) -> None:
    """Weights that train moved as they should, and no others."""
    wanted, before = dict(want.named_parameters()), dict(start.named_parameters())
    moved = [key for key in wanted if not torch.equal(wanted[key], before[key])]
    # A bias of keys raises all scores of a query alike. Its gradient is what rounds, which AdamW scales up.
    noise = [key for key in moved if float((wanted[key] - before[key]).detach().norm()) < 1e-9]
    assert all(key.endswith("k_proj.bias") for key in noise), noise
    moved = [key for key in moved if key not in noise]
    update = torch.cat([(wanted[key] - before[key]).detach().flatten() for key in moved])
    residual = torch.cat([(got[key].double() - wanted[key].detach()).flatten() for key in moved])
    assert float(residual.norm() / update.norm()) < 1e-3  # AdamW divides gradients near zero by themselves
    for key in wanted.keys() - set(moved) - set(noise):
        assert torch.equal(got[key], before[key].float()), key
    assert any("visual" in key or "vision" in key for key in moved) or case.freeze_vision_tower
