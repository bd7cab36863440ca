"""The figures of a report, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.rollouts import rollout_of
from tests.support.step3_records import changed, made_experience
from tests.support.step3_records import made as records_made
from threestep.plugins.mismatch.correction import MismatchCorrection
from threestep.plugins.mismatch.settings import MismatchSettings
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageSettings
from training.step3_ppo.contracts.records import Experience
from training.step3_ppo.contracts.settings import ExperienceSettings, KlSettings, LengthSettings
from training.step3_ppo.experience import description
from training.step3_ppo.experience.description import described, reward_means
from training.step3_ppo.kl import KL_ESTIMATORS, KlControl
from training.utils.layout.planner import PlanSettings

CPU = torch.device("cpu")
SETTINGS = records_made(
    ExperienceSettings,
    temperature=1.0, score_scale=None, clip_reward=5.0, samples_per_prompt=2, estimator=ESTIMATORS["gae"],
    advantage=AdvantageSettings(1.0, 0.95, True), whiten_advantages=True,
    kl=KlSettings(KlControl(0.1), False, KL_ESTIMATORS["k1"]),
    length=LengthSettings(2, missing_eos_penalty=1.0),
    correction=MismatchCorrection(MismatchSettings("truncate", "token", 1.5)),
    reads_old_logprobs=True, plan=PlanSettings(1), pad_token_id=0,
)  # fmt: skip


def made() -> Experience:
    """Two samples of one prompt, of 1 and 2 tokens."""
    sampled_BR, ended_B = torch.tensor([[-1.0, 0.0], [-2.0, -3.0]]), torch.tensor([True, False])
    rollout = rollout_of([[3, 4]] * 2, [[5], [6, 7]], sampled_logprobs_BR=sampled_BR, ended_B=ended_B)
    return made_experience(
        rollout=rollout,
        scores_B=torch.tensor([1.0, 2.0]),
        counts_B=torch.tensor([True, False]),
        rewards_BR=torch.zeros(2, 2),
        advantages_BR=torch.tensor([[-1.0, 0.0], [1.0, 3.0]]),
        old_logprobs_BR=torch.tensor([[-1.5, 0.0], [-2.0, -2.0]]),
        ref_logprobs_BR=torch.tensor([[-2.0, 0.0], [-2.5, -2.0]]),
        values_BR=torch.tensor([[1.0, 0.0], [2.0, 3.0]]),
        returns_BR=torch.tensor([[2.0, 0.0], [2.0, 5.0]]),
        outcomes_B=torch.tensor([1.0, 1.0]),  # the second did not end
    )


def test_by_hand():
    figures = described([made(), made()], SETTINGS)
    mismatch = [figures.pop(name) for name in list(figures) if name.startswith("mismatch/")]
    assert len(mismatch) > 20  # test_figures.py has them
    assert figures == pytest.approx(
        {
            "rollout/tokens": 2 * (3 + 4),
            "rollout/drawn_tokens": 2 * (1 + 2),
            "rollout/rank_tokens_mean": 7.0,
            "rollout/rank_tokens_std": 0.0,
            "rollout/rank_tokens_min": 7.0,
            "rollout/rank_tokens_max": 7.0,
            "rollout/clipped_share": 0.5,
            "rollout/empty_share": 0.5,
            "rollout/response_tokens": 1.5,
            "rollout/response_tokens_std": 0.5,
            "rollout/response_tokens_min": 1.0,
            "rollout/response_tokens_max": 2.0,
            "rollout/prompt_tokens_mean": 2.0,
            "rollout/prompt_tokens_std": 0.0,
            "rollout/prompt_tokens_min": 2.0,
            "rollout/prompt_tokens_max": 2.0,
            "rollout/score": 1.5,
            "rollout/score_std": 0.5,
            "rollout/score_min": 1.0,
            "rollout/score_max": 2.0,
            "rollout/reward": 0.0,
            "rollout/reward_std": 0.0,
            "rollout/reward_min": 0.0,
            "rollout/reward_max": 0.0,
            "rollout/outcome": 1.0,
            "rollout/equal_groups": 1.0,
            "rollout/kl": (0.5 + 0.5 + 0.0) / 2,
            "rollout/ended_share": 0.5,
            "rollout/left_out": 0.5,
            "rollout/entropy": (1.0 + 2.0 + 3.0) / 3,
            "rollout/advantage_mean": 1.0,  # -1 | 1, 3
            "rollout/advantage_std": math.sqrt(8 / 3),
            "rollout/advantage_min": -1.0,
            "rollout/advantage_max": 3.0,
            "rollout/logprob_mismatch": 1.5 / 3,  # old - sampled: -0.5 | 0, 1
            "critic/value_mean": 2.0,  # 1 | 2, 3
            "critic/value_std": math.sqrt(2 / 3),
            "critic/value_min": 1.0,
            "critic/value_max": 3.0,
            "critic/return_mean": 3.0,  # 2 | 2, 5
            "critic/return_std": math.sqrt(2),
            "critic/return_min": 2.0,
            "critic/return_max": 5.0,
            "critic/error_mean": 1.0,  # 1 | 0, 2
            "critic/error_std": math.sqrt(2 / 3),
            "critic/explained_variance": 1 - (2 / 3) / 2,
        }
    )


def test_rewards_with_the_kls_part_and_returns_without_a_critic():
    """Rewards 1 | -0.5, 2 with gamma 1: returns 1 | 1.5, 2, sums 1 and 1.5. Columns behind a response are not read."""
    rewards_BR = torch.tensor([[1.0, 0.0], [-0.5, 2.0]])
    without = changed(made(), rewards_BR=rewards_BR, values_BR=None, returns_BR=None)
    found = described([without, without], SETTINGS)
    of_sums = [found[f"rollout/reward{statistic}"] for statistic in ("", "_std", "_min", "_max")]
    assert of_sums == pytest.approx([1.25, 0.25, 1.0, 1.5])
    of_returns = [found[f"rollout/return_{statistic}"] for statistic in ("mean", "std", "min", "max")]
    assert of_returns == pytest.approx([1.5, math.sqrt(1 / 6), 1.0, 2.0])
    assert not any(name.startswith("critic/") for name in found)
    assert "rollout/return_mean" not in described([made()], SETTINGS)


def test_probabilities_in_training_and_in_the_rollout():
    """Pearson's correlation over all tokens of all micro-batches: not a mean of theirs."""
    generator = torch.Generator().manual_seed(0)

    def drawn(seed: int) -> Experience:
        old, sampled = -torch.rand(2, 2, 2, generator=generator) * 3
        rollout = changed(made().rollout, sampled_logprobs_BR=sampled)
        return changed(made(), rollout=rollout, old_logprobs_BR=old)

    each = [drawn(seed) for seed in range(5)]
    found = described(each, SETTINGS)
    mask = made().rollout.drawn.mask_BR
    train, rollout = (
        torch.cat([values[mask] for values in both]).double().exp()
        for both in ([e.old_logprobs_BR for e in each], [e.rollout.sampled_logprobs_BR for e in each])
    )
    correlation = float(torch.corrcoef(torch.stack([train, rollout]))[0, 1])
    assert found["mismatch/probability_correlation"] == pytest.approx(correlation, abs=1e-12)
    difference = (train - rollout).abs()
    assert found["mismatch/probability_difference_mean"] == pytest.approx(float(difference.mean()), rel=1e-12)
    assert found["mismatch/probability_difference_max"] == pytest.approx(float(difference.max()), rel=1e-12)
    deviations = float(difference.std(correction=0)), float((train - rollout).std(correction=0))
    assert found["mismatch/probability_difference_std"] == pytest.approx(deviations[0], rel=1e-9)
    assert found["mismatch/probability_gap_std"] == pytest.approx(deviations[1], rel=1e-9)


def test_equal_probabilities_correlate_exactly_and_constant_ones_not_at_all():
    same = changed(made(), old_logprobs_BR=made().rollout.sampled_logprobs_BR)
    assert described([same], SETTINGS)["mismatch/probability_correlation"] == 1.0
    constant = changed(made(), old_logprobs_BR=torch.full((2, 2), -1.0))
    assert "mismatch/probability_correlation" not in described([constant], SETTINGS)


def test_the_share_that_the_bounds_change():
    assert described([made()], SETTINGS)["mismatch/clipped_share"] == pytest.approx(1 / 3)  # e is above 1.5


def test_what_is_missing_has_no_figure():
    bare = changed(made(), old_logprobs_BR=None, ref_logprobs_BR=None, values_BR=None, returns_BR=None)
    figures = described([bare], SETTINGS)
    assert not any(name.startswith(("critic/", "mismatch/")) for name in figures)
    assert "rollout/kl" not in figures and "rollout/logprob_mismatch" not in figures
    differing = changed(made(), outcomes_B=torch.tensor([1.0, 0.0]))
    assert described([differing], SETTINGS)["rollout/equal_groups"] == 0.0
    sampled = described([changed(made(), old_logprobs_BR=None)], SETTINGS)
    assert sampled["rollout/kl"] == pytest.approx((1.0 + 0.5 - 1.0) / 2)  # by the rollout's own log-probabilities
    constant = described([changed(made(), returns_BR=torch.ones(2, 2))], SETTINGS)  # which leaves nothing to explain
    assert "critic/explained_variance" not in constant and constant["critic/return_mean"] == 1.0
    alone = changed(SETTINGS, samples_per_prompt=1)
    assert "rollout/equal_groups" not in described([made()], alone)


def test_rewards_are_means_over_those_that_have_them(monkeypatch):
    nan = float("nan")
    first = changed(made(), parts={"gsm8k": torch.tensor([1.0, 0.0])})
    both = {"gsm8k": torch.tensor([1.0, 1.0]), "gsm8k/n": torch.tensor([nan, 3.0]), "none": torch.tensor([nan, nan])}
    second = changed(made(), parts=both)
    assert reward_means([first, second]) == {"reward/gsm8k": 3 / 4, "reward/gsm8k/n": 3.0}
    assert described([first, second], SETTINGS)["reward/gsm8k"] == 3 / 4
    # Another rank has one response of each, and a value that this one lacks.
    other = {"gsm8k": (0.0, 1), "gsm8k/n": (1.0, 1), "gsm8k/m": (5.0, 1)}
    monkeypatch.setattr(description, "gathered", lambda own: [own, other])
    means = {"reward/gsm8k": 3 / 5, "reward/gsm8k/n": 2.0, "reward/gsm8k/m": 5.0}
    assert reward_means([first, second]) == means


def test_variance_proxies_by_hand():
    """w 0.5; 1, 0.25 with A -1; 1, 3: powers 0.5 and 1 + 9 x 0.25 = 3.25, energies 0.5 and 1.25."""
    # 1 - 2 p + the sum of p^2 is that sum where p is a half.
    sums_BR = torch.tensor([[0.5, 0.0], [1.0, 0.25]])
    own = changed(made(), logprobs_BR=torch.full((2, 2), 0.5).log(), collisions_BR=sums_BR)
    figures = described([own], changed(SETTINGS, reports_variance=True))
    assert (figures["variance/power"], figures["variance/energy"]) == (1.875, 0.875)


@pytest.mark.parametrize(("room", "share"), [(2, 1.0), (3, 0.0)])
def test_prompts_that_fill_their_room(room, share):
    assert described([made()], changed(SETTINGS, max_prompt_tokens=room))["rollout/full_prompt_share"] == share
