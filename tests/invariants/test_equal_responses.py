"""Where all responses to a prompt are one text there is no advantage, in any layout, dtype and number of ranks; and
layouts agree on all others as far as the scores' rounding lets them."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from tests.support.plain_roles import plain_roles
from tests.support.rollouts import rollout_of
from tests.support.tiny_models import tiny_scalar_model
from training.step3_ppo.advantages import ESTIMATORS as TABLE
from training.step3_ppo.experience.experience import make_experience
from training.step3_ppo.experience.scoring import start_scoring
from training.step3_ppo.flags.algorithm import experience_settings, selected_algorithm
from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
from training.utils.base.errors import Mistakes
from training.utils.contracts.rows import PromptRow
from training.utils.engine.ranks.collectives import gathered
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout
from training.utils.models.token_model import ScalarModel
from training.utils.run.phase_clock import PhaseClock

SAMPLES, BATCH = 4, 10  # of a group, and groups of a batch
END, PAD = 2, 0
ESTIMATORS = (
    "grpo", "rloo", "gpg", "opo", "grpo_passk", "optimal_token_baseline", "tir_optimal_token_baseline", "dr_grpo",
    "reinforce++_baseline", "grpo_over_batch",
)  # fmt: skip
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "full")


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool, groups: int) -> dict[str, Any]:
    """Write advantages of groups of short responses at random, many of which are one text: by dtype and layout the
    responses' ids, outcomes and advantages, in the order of the groups. Every batch of groups has another estimator;
    half of them have a KL in the reward."""
    found = {
        f"{name}_{'packed' if packed else 'padded'}": every_batch(ranks, dtype, packed, groups)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        for packed in (True, False)
    }
    if ranks.is_main:
        torch.save(found, out / "found.pt")
    return {}


def group_at(number: int) -> tuple[list[int], list[list[int]]]:
    """A prompt and its responses, of up to three tokens and an end; of few different tokens, so that they repeat."""
    dice = random.Random(number)
    prompt = [dice.randint(3, 63) for _ in range(dice.randint(1, 8))]
    words = [dice.randint(3, 63) for _ in range(dice.choice([1, 1, 2, 9]))]
    longest = dice.randint(0, 3)
    return prompt, [
        [dice.choice(words) for _ in range(dice.choice([longest, longest, 1]))] + [END] for _ in range(SAMPLES)
    ]


def every_batch(ranks: Any, dtype: Any, packed: bool, groups: int) -> list[dict[str, Any]]:
    roles = roles_of(ranks, dtype)
    found = []
    for first in range(0, groups, BATCH):
        own = range(first + ranks.rank, first + BATCH, ranks.world_size)
        number = first // BATCH
        parts = gathered(one_batch(ranks, roles, packed, number, own))
        found.append(
            {
                "estimator": ESTIMATORS[number % len(ESTIMATORS)],
                "ids": [group_at(group)[1] for group in range(first, first + BATCH)],
                **{name: interleaved([part[name] for part in parts]) for name in parts[0]},
            }
        )
    return found


def interleaved(parts: list[Any]) -> Any:
    """[G, SAMPLES, ...] of all ranks, in the order of the groups, padded to one width."""
    width = max(part.shape[-1] for part in parts)
    each = [pad(part, (0, width - part.shape[-1])).unflatten(0, (-1, SAMPLES)) for part in parts]
    return torch.stack(each, dim=1).flatten(0, 1)


def roles_of(ranks: Any, dtype: Any) -> Any:
    scorer = tiny_scalar_model("llama", dtype, seed=5)
    roles, _ = plain_roles(ScalarModel(scorer).requires_grad_(False), with_critic=False, ranks=ranks)
    assert roles.reference is not None and roles.reference.frozen is not None
    for module in (roles.actor.module, roles.reference.frozen):
        module.to(dtype)  # type: ignore[attr-defined]
    return roles


def one_batch(ranks: Any, roles: Any, packed: bool, number: int, groups: range) -> dict[str, Any]:
    """This rank's groups. Collectives."""
    settings = settings_of(ranks, packed, number)
    drawn = [group_at(group) for group in groups]
    rows = [PromptRow(group, np.array(ids, np.int32), "", None) for group, (ids, _) in zip(groups, drawn, strict=True)]
    pairs = [(prompt, response) for prompt, responses in drawn for response in responses]
    samples = start_scoring(rows, rollout_of(*zip(*pairs, strict=True), pad=PAD), roles, settings)
    made = make_experience(samples, roles, settings, settings.kl.control.kl_coef, clock=PhaseClock())
    return {"outcomes": samples.scored.outcomes_B.unsqueeze(1), "advantages": made.advantages_BR}


def settings_of(ranks: Any, packed: bool, number: int) -> Any:
    estimator, turn = ESTIMATORS[number % len(ESTIMATORS)], number // len(ESTIMATORS)
    kl: dict[str, Any] = {"kl_coef": 0.0}
    if turn % 2:
        kl = {"kl_coef": 0.1, "kl_estimator": KL_ESTIMATORS[turn // 2 % len(KL_ESTIMATORS)]}
    forms: dict[str, dict[str, Any]] = {
        "dr_grpo": {"advantage": "grpo", "norm_adv_by_std": False},
        "grpo_over_batch": {"advantage": "grpo", "norm_adv_over": "batch"},
        "reinforce++_baseline": {"advantage": estimator, "whiten_advantages": False},  # its mean is not of a group
    }
    flags = AlgorithmArguments(**forms.get(estimator, {"advantage": estimator}), **kl)
    ppo = PpoArguments(num_samples_per_prompt=SAMPLES, clip_reward=100.0)
    algorithm = selected_algorithm(flags, ppo, Mistakes())
    assert algorithm is not None
    plan = PlanSettings(ranks.world_size, 300 if packed else None, 16, packed, 60 if packed else 0)
    return experience_settings(algorithm, ppo, SequenceLayout(plan, PAD, ranks.rank))


# Of a score, between two layouts, as a share of the largest of a batch: some units in the last place (see `scoring`).
ROUNDING = {"fp32": 32 * torch.finfo(torch.float32).eps, "bf16": 16 * torch.finfo(torch.bfloat16).eps}


@pytest.mark.parametrize(
    "groups", [len(ESTIMATORS) * BATCH, pytest.param(10_000, marks=pytest.mark.long)], ids=["some", "many"]
)
def test_no_advantage_where_all_responses_are_one_text(launched, groups):
    found = {size: torch.load(launched("test_equal_responses", size, groups=groups)[0] / "found.pt") for size in (1, 2)}
    layouts = {f"{ranks} {layout}": batches for ranks, own in found.items() for layout, batches in own.items()}
    alike = equal = 0
    for name, batches in layouts.items():
        for batch in batches:
            is_one = torch.tensor([all(ids == responses[0] for ids in responses) for responses in batch["ids"]])
            largest = float(batch["advantages"][is_one].abs().amax()) if is_one.any() else 0.0
            assert largest == 0.0, (name, batch["estimator"], largest)
            differs = batch["outcomes"].amax(dim=1) != batch["outcomes"].amin(dim=1)
            assert not differs.flatten()[is_one].any(), name
            alike, equal = alike + int(is_one.sum()), equal + int((~differs).sum())
    assert alike > len(layouts) * groups // 6  # and of the others few are equal
    assert alike <= equal < 1.1 * alike
    first = {dtype: layouts[f"1 {dtype}_packed"] for dtype in ROUNDING}
    for dtype, ranks, layout in product(ROUNDING, found, ("packed", "padded")):
        for one, other in zip(first[dtype], layouts[f"{ranks} {dtype}_{layout}"], strict=True):
            agree(one, other, dtype)


def agree(one: dict, other: dict, dtype: str) -> None:
    """Outcomes differ by rounding; advantages by that over what they are divided by."""
    scores, others = one["outcomes"].squeeze(-1), other["outcomes"].squeeze(-1)
    rounding = ROUNDING[dtype] * float(scores.abs().max())
    assert (scores - others).abs().max() <= rounding
    if one["estimator"] == "grpo":
        apart = (one["advantages"] - other["advantages"]).abs().amax(dim=(1, 2))
        spread = torch.minimum(scores.std(dim=1), others.std(dim=1))
        assert (apart <= 4 * rounding / spread).all()  # no bound where one of them sees no spread
        is_wide = spread > 0.1 * float(scores.abs().max())
        assert is_wide.any() and apart[is_wide].max() < {"fp32": 2.5e-4, "bf16": 0.25}[dtype]


def test_every_estimator_that_compares_samples_is_among_them():
    assert {name for name, estimator in TABLE.items() if estimator.needs_groups} <= set(ESTIMATORS)
