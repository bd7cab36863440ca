"""Rollouts and models become an Experience: each part against its own naive computation."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.support.rollouts import rollout_of
from tests.support.step3_records import made as records_made
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from threestep.plugins.mismatch.correction import MismatchCorrection
from threestep.plugins.mismatch.settings import MismatchSettings, Rejection
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.estimators import gae
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings
from training.step3_ppo.contracts.records import Samples, Scored
from training.step3_ppo.contracts.settings import ExperienceSettings, KlSettings, LengthSettings
from training.step3_ppo.experience.description import score_norms
from training.step3_ppo.experience.experience import make_experience
from training.step3_ppo.experience.scoring import outcome_scores, score
from training.step3_ppo.kl import KL_ESTIMATORS, KlControl
from training.utils.contracts.rollout import Rollout
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout, rank_share
from training.utils.loading.configurations import ScoreScale
from training.utils.models.token_model import PolicyModel, ScalarModel
from training.utils.run.phase_clock import PhaseClock

PAD = EOS = 2  # pad is eos: every mask has to come from lengths
PROMPTS = [4, 2, 7, 1, 3]
RESPONSES = [3, 1, 5, 6, 2]
IN_LOSS = KlSettings(KlControl(0.1), in_loss=True, estimator=KL_ESTIMATORS["k1"])


@pytest.fixture(scope="module")
def roles() -> SimpleNamespace:
    """Four small models that differ, in place of the engines; `reading` notes that it was entered."""
    policy = tiny_causal_lm("llama", seed=1)
    state = SimpleNamespace(
        actor=PolicyModel(policy),
        actor_model=policy,
        experts=None,
        reference=PolicyModel(tiny_causal_lm("llama", seed=2)),
        critic=ScalarModel(tiny_scalar_model("llama", seed=3)),
        reward_model=ScalarModel(tiny_scalar_model("llama", seed=4)),
        scorer=None,
        entered=0,
    )

    @contextlib.contextmanager
    def reading():
        state.entered += 1
        yield

    state.reading = reading
    return state


@pytest.fixture
def rollout() -> Rollout:
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    pairs = [(drawn(prompt), [*drawn(response)[:-1], EOS]) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    return rollout_of(*zip(*pairs, strict=True), pad=PAD)


def kl_of(estimator: str) -> KlSettings:
    """Of the reward."""
    return KlSettings(KlControl(0.1), in_loss=False, estimator=KL_ESTIMATORS[estimator])


def how(**changes) -> ExperienceSettings:
    given = {
        "temperature": 0.8, "score_scale": None, "clip_reward": 100.0, "samples_per_prompt": 1,
        "estimator": ESTIMATORS["gae"], "advantage": AdvantageSettings(0.9, 0.7, True), "whiten_advantages": False,
        "kl": kl_of("k1"), "length": LengthSettings(6),
        "reads_old_logprobs": True, "plan": PlanSettings(1, max_rows_per_micro_batch=2), "pad_token_id": PAD,
    }  # fmt: skip
    given |= changes
    given["advantage"] = dataclasses.replace(given["advantage"], options=(own := given["estimator"].flags) and own())
    given.setdefault("with_collisions", given["estimator"].needs_policy or given.get("reports_variance", False))
    return records_made(ExperienceSettings, **given)


def made_from(rollout: Rollout, roles, settings: ExperienceSettings, greedy_scores_B=None):
    def samples(scores_B) -> Samples:
        outcomes_B = outcome_scores(rollout, scores_B, settings.scoring.length)
        scored = Scored(scores_B, outcomes_B, {"model": scores_B})
        return Samples((), rollout, lambda: scored)

    greedy = None if greedy_scores_B is None else samples(greedy_scores_B)
    return make_experience(
        samples(score(rollout, roles, settings)), roles, settings, 0.1, clock=PhaseClock(), greedy=greedy
    )


def logits_of(policy, rollout: Rollout, row: int) -> torch.Tensor:
    """In the states from which the response's tokens are drawn, of the sequence alone by the model's own forward."""
    ids = torch.cat([rollout.prompt_of(row), rollout.response_of(row)])[None]
    with torch.no_grad():
        return policy.model(ids, use_cache=False).logits[0, PROMPTS[row] - 1 : -1] / 0.8


def one_by_one(rollout: Rollout, roles) -> dict[str, torch.Tensor]:
    """Each sequence alone, through the plain models' own forward."""
    found: dict[str, list[torch.Tensor]] = {"old": [], "ref": [], "values": [], "scores": []}
    for row, prompt in enumerate(PROMPTS):
        ids = torch.cat([rollout.prompt_of(row), rollout.response_of(row)])[None]
        for name, policy in (("old", roles.actor), ("ref", roles.reference)):
            logprobs = torch.log_softmax(logits_of(policy, rollout, row), -1)
            found[name].append(logprobs.gather(-1, ids[0, prompt:, None])[:, 0])
        with torch.no_grad():
            hidden = roles.critic.model.model(ids, use_cache=False)[0][0, prompt - 1 : -1]
            found["values"].append(roles.critic.model.score(hidden)[:, 0])
            hidden = roles.reward_model.model.model(ids, use_cache=False)[0][0, -1]
            found["scores"].append(roles.reward_model.model.score(hidden))
    scores = torch.cat(found.pop("scores"))
    padded = {name: torch.nn.utils.rnn.pad_sequence(parts, batch_first=True) for name, parts in found.items()}
    return {**padded, "scores": scores}


def read(made) -> dict[str, torch.Tensor]:
    return {
        "old": made.old_logprobs_BR, "ref": made.read.ref_logprobs_BR, "values": made.read.values_BR,
        "scores": made.scored.scores_B, "rewards": made.rewards_BR, "advantages": made.advantages_BR,
        "returns": made.returns_BR,
    }  # fmt: skip


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, values in want.items():
        torch.testing.assert_close(got[name], values, rtol=1e-4, atol=1e-5, msg=name)


PLANS = [
    PlanSettings(1, None, 1),
    PlanSettings(1, 16, 8),
    PlanSettings(1, packed=True, max_row_tokens=13),
    PlanSettings(1, packed=True, max_row_tokens=100, quadratic_tokens=1e9),  # one long row
]


@pytest.mark.parametrize(
    "plan",
    [
        *PLANS,
        PlanSettings(1, None, 2),
        PlanSettings(1, None, 8),
        PlanSettings(1, 26, packed=True, max_row_tokens=13),
    ],
)
def test_every_field_is_what_the_models_say_of_each_sequence_alone(rollout, roles, plan):
    entered = roles.entered
    made = made_from(rollout, roles, how(plan=plan))
    expected = one_by_one(rollout, roles)
    rewards_BR = -0.1 * (expected["old"] - expected["ref"])
    for row, length in enumerate(RESPONSES):
        rewards_BR[row, length - 1] += expected["scores"][row]
    inputs = AdvantageInputs(rewards_BR, rollout.response_lengths_B, torch.arange(5), expected["values"])
    advantages_BR, returns_BR = gae(inputs, AdvantageSettings(0.9, 0.7, True))
    assert_close(read(made), {**expected, "rewards": rewards_BR, "advantages": advantages_BR, "returns": returns_BR})
    assert made.rollout is rollout and roles.entered == entered + 1
    for name, field in read(made).items():
        assert field.dtype == torch.float32 and not field.requires_grad
        assert name == "scores" or not field[~rollout.response_mask_BR].any()


@pytest.mark.parametrize("most", [100, 17])  # tokens of a row: all samples of a prompt together, or two and two
def test_samples_share_their_prompt(rollout, roles, most):
    ids_BP, mask_BP = rollout.prompt_ids_BP[[0, 2, 0, 0, 2]], rollout.prompt_mask_BP[[0, 2, 0, 0, 2]]
    samples = dataclasses.replace(rollout, prompt_ids_BP=ids_BP, prompt_mask_BP=mask_BP)
    packed = PlanSettings(1, packed=True, max_row_tokens=most, quadratic_tokens=1e9)
    tokens = sum(
        int((rows.segment_ids_NT >= 0).sum())
        for _, rows in rank_share(samples.sequences(), SequenceLayout(packed, PAD, 0), torch.device("cpu"))
    )
    # Prompts of 4 and 7 tokens, 17 response tokens. In 17 tokens a prompt of 4 has room for responses of 3, 5 and not
    # of 6 more; one of 7 for responses of 1 and 2.
    assert tokens == (4 + 7 if most == 100 else 4 + 4 + 7) + 17
    one, two = (read(made_from(samples, roles, how(plan=plan))) for plan in (packed, PlanSettings(1, None, 1)))
    assert_close(one, {name: two[name] for name in two if name != "rewards"})


def test_whitening_touches_the_advantages_alone(rollout, roles):
    plain, white = made_from(rollout, roles, how()), made_from(rollout, roles, how(whiten_advantages=True))
    inside = white.advantages_BR[rollout.response_mask_BR]
    assert inside.mean().item() == pytest.approx(0, abs=1e-5) and inside.std().item() == pytest.approx(1, abs=1e-3)
    assert torch.equal(plain.returns_BR, white.returns_BR)
    assert torch.equal(plain.rewards_BR, white.rewards_BR)


def test_whitening_counts_what_learns(rollout, roles):
    """The second response did not end and is left out: what it scores moves no other advantage."""
    cut = dataclasses.replace(rollout, ended_B=torch.tensor([True, False, True, True, True]))
    length = LengthSettings(6, mask_truncated_responses=True)
    found = [
        made_from(cut, roles, how(whiten_advantages=True, length=dataclasses.replace(length, missing_eos_penalty=off)))
        for off in (0.0, 50.0)
    ]
    assert torch.equal(found[0].advantages_BR, found[1].advantages_BR) and not found[0].advantages_BR[1].any()
    learns_BR = cut.response_mask_BR & cut.ended_B[:, None]
    inside = found[0].advantages_BR[learns_BR]
    assert inside.mean().item() == pytest.approx(0, abs=1e-5) and inside.std().item() == pytest.approx(1, abs=1e-3)


def test_scores_are_put_on_a_scale_and_clipped(rollout, roles):
    free = score(rollout, roles, how())
    for scale, want in ((None, free), (ScoreScale(mean=float(free.mean()), std=0.5), (free - free.mean()) * 2)):
        scaled = score(rollout, roles, how(score_scale=scale))
        torch.testing.assert_close(scaled, want)
        bound = float(scaled.abs().median())
        clipped = score(rollout, roles, how(score_scale=scale, clip_reward=bound))
        torch.testing.assert_close(clipped, scaled.clamp(-bound, bound))
        assert not torch.equal(clipped, scaled)


def picked(rollout: Rollout, places) -> Rollout:
    """The sequences at these places."""
    names = [field.name for field in dataclasses.fields(Rollout) if torch.is_tensor(getattr(rollout, field.name))]
    return dataclasses.replace(rollout, **{name: getattr(rollout, name)[places] for name in names})


def with_a_twin(rollout: Rollout) -> Rollout:
    """The first sequence four times, then all."""
    return picked(rollout, [0, 0, 0, *range(len(PROMPTS))])


def test_equal_responses_are_scored_once(rollout, roles):
    read = []

    def counted(rows):
        read.append(len(rows.end_B))
        return roles.reward_model(rows)

    scorer = SimpleNamespace(dtype=torch.bfloat16)
    once = SimpleNamespace(**{**vars(roles), "reward_model": counted, "scorer": scorer})
    found = score(with_a_twin(rollout), once, how())
    assert sum(read) == len(PROMPTS)
    torch.testing.assert_close(found[3:], score(rollout, roles, how()))
    assert found[:4].unique().numel() == 1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "full"])
def test_equal_responses_have_the_same_kl_in_the_reward(rollout, roles, estimator):
    """Padded rows of several widths, in which rounding differs."""
    made = made_from(
        with_a_twin(rollout), roles, how(kl=kl_of(estimator), plan=PlanSettings(1, max_rows_per_micro_batch=3))
    )
    assert all(row_R.equal(made.rewards_BR[0]) for row_R in made.rewards_BR[1:4])
    assert made.rewards_BR[0, : RESPONSES[0] - 1].any()


def test_the_score_is_read_at_the_end_token(rollout, roles):
    """Another end token is another score: the token that ends the response is what the model reads."""
    other_ids_BR = rollout.response_ids_BR.clone()
    for row, length in enumerate(RESPONSES):
        other_ids_BR[row, length - 1] = 17
    other = dataclasses.replace(rollout, response_ids_BR=other_ids_BR)
    assert (score(rollout, roles, how()) - score(other, roles, how())).abs().min() > 1e-3
    longer = torch.nn.functional.pad(rollout.response_ids_BR, (0, 4), value=PAD)
    longer = dataclasses.replace(rollout, response_ids_BR=longer)
    torch.testing.assert_close(score(longer, roles, how()), score(rollout, roles, how()))


def test_the_samples_of_a_prompt_are_compared(rollout, roles):
    """Five prompts' worth of one rollout, read as groups of five samples of one prompt: no critic, no KL."""
    without = SimpleNamespace(**{**vars(roles), "critic": None, "reference": None})
    made = made_from(rollout, without, how(samples_per_prompt=5, estimator=ESTIMATORS["rloo"]))
    scores = made.scored.scores_B.tolist()
    for row, length in enumerate(RESPONSES):
        want = scores[row] - (sum(scores) - scores[row]) / 4
        assert made.advantages_BR[row, :length].tolist() == pytest.approx([want] * length, abs=1e-5)
    assert [name for name, field in read(made).items() if field is None] == ["ref", "values", "returns"]


def test_old_log_probabilities_that_nothing_reads_are_not_computed(rollout, roles):
    calls = []
    actor = SimpleNamespace(**{**vars(roles), "actor": lambda *given: calls.append(given)})
    settings = how(reads_old_logprobs=False, kl=IN_LOSS)
    made = made_from(rollout, actor, settings)
    assert calls == [] and made.old_logprobs_BR is None and made.read.ref_logprobs_BR is not None
    assert torch.equal(made.rewards_BR.sum(1), made.scored.scores_B)  # no KL in the reward


def test_another_estimate_of_the_kl(rollout, roles):
    made = made_from(rollout, roles, how(kl=kl_of("k2")))
    want = made.scored.scores_B - 0.1 * 0.5 * (made.old_logprobs_BR - made.read.ref_logprobs_BR).square().sum(1)
    torch.testing.assert_close(made.rewards_BR.sum(1), want)


@pytest.mark.parametrize("packed", [False, True])
def test_the_exact_kl_is_the_sum_over_the_vocabulary(rollout, roles, packed):
    plan = PlanSettings(1, packed=packed, max_row_tokens=13, max_rows_per_micro_batch=None if packed else 2)
    made = made_from(rollout, roles, how(kl=kl_of("full"), plan=plan))
    for row in range(len(PROMPTS)):
        log_p, log_q = (
            logits_of(each, rollout, row).double().log_softmax(-1) for each in (roles.actor, roles.reference)
        )
        want_r = -0.1 * (log_p.exp() * (log_p - log_q)).sum(-1)
        want_r[-1] += made.scored.scores_B[row]
        torch.testing.assert_close(made.rewards_BR[row, : len(want_r)].double(), want_r, rtol=1e-4, atol=1e-5)
    plain = made_from(rollout, roles, how(plan=plan))
    torch.testing.assert_close(made.old_logprobs_BR, plain.old_logprobs_BR)
    torch.testing.assert_close(made.read.ref_logprobs_BR, plain.read.ref_logprobs_BR)


def test_the_greedy_baseline(rollout, roles):
    """A response that scores the same but for rounding is nothing to learn from: it is often the sample itself, and two
    forwards scored them."""
    settings = how(estimator=ESTIMATORS["remax"], kl=IN_LOSS)
    made = made_from(rollout, roles, settings, torch.arange(5.0))
    torch.testing.assert_close(made.advantages_BR[:, 0], made.scored.scores_B - torch.arange(5.0))
    apart_B = torch.tensor([0.0, 5e-6, -5e-6, 1e-4, -1e-4])
    made = made_from(rollout, roles, settings, score(rollout, roles, how()) + apart_B)
    assert made.advantages_BR.any(dim=1).tolist() == [False, False, False, True, True]


def test_lengths_and_ends_come_off_the_score_and_out_of_the_loss(rollout, roles):
    cut = dataclasses.replace(rollout, ended_B=torch.tensor([True, False, True, False, True]))
    length = LengthSettings(6, 2.0, overlong_buffer_tokens=2, overlong_penalty=0.5, mask_truncated_responses=True)
    # Lengths 3, 1, 5, 6, 2: beyond 4 tokens half a point for two of them.
    off_B = torch.tensor([0.0, -2.0, -0.25, -2.5, 0.0])
    torch.testing.assert_close(outcome_scores(cut, torch.zeros(5), length), off_B)
    made = made_from(cut, roles, how(length=length, kl=IN_LOSS))
    torch.testing.assert_close(made.rewards_BR.sum(1), made.scored.scores_B + off_B)
    assert made.counts_B.tolist() == [True, False, True, False, True]
    assert made_from(cut, roles, how()).counts_B.all()


def off_policy(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, sampled_logprobs_BR=torch.where(rollout.response_mask_BR, -3.0, 0.0))


def corrected(kind: str, *more, **how_to) -> dict[str, MismatchCorrection]:
    return {"correction": MismatchCorrection(MismatchSettings(kind, *more, **how_to))}


def test_the_weights_of_the_correction(rollout, roles):
    off, mask_BR = off_policy(rollout), rollout.response_mask_BR
    made = made_from(off, roles, how(**corrected("truncate", "token", 2.0)))
    ratio_BR = torch.exp(made.old_logprobs_BR - off.sampled_logprobs_BR).clamp(max=2.0)
    torch.testing.assert_close(made.corrected.weights_BR, torch.where(mask_BR, ratio_BR, 0.0))
    assert made.corrected.kept_BR is None and made_from(off, roles, how()).corrected.weights_BR is None
    some = corrected("none", rejection=(Rejection("token_k1", 0.5, 1.5),), rejected="leave")
    rejected = made_from(off, roles, how(**some)).corrected
    kept_BR = (ratio_BR >= 0.5) & (ratio_BR <= 1.5) & mask_BR
    assert torch.equal(rejected.kept_BR, kept_BR) and 0 < int(kept_BR.sum()) < int(mask_BR.sum())
    assert torch.equal(rejected.weights_BR, kept_BR.float())


def test_a_bypass_takes_the_rollouts_log_probabilities_for_the_old_ones(rollout, roles):
    off = off_policy(rollout)
    made = made_from(off, roles, how(**corrected("none", bypass=True), reads_old_logprobs=False))
    kl_BR = off.sampled_logprobs_BR - made.read.ref_logprobs_BR  # the KL is the rollout's too
    torch.testing.assert_close((made.rewards_BR + 0.1 * kl_BR).sum(1), made.scored.scores_B)
    assert torch.equal(made.old_logprobs_BR, off.sampled_logprobs_BR) and made.corrected.weights_BR is None


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("exact_kl", [False, True])
def test_the_optimal_token_baseline_reads_the_policys_distributions(rollout, roles, plan, exact_kl):
    """The sum of squared probabilities of each token's whole distribution, at the sampling temperature."""
    estimator = ESTIMATORS["optimal_token_baseline"]
    kl = kl_of("full" if exact_kl else "k1")
    made = made_from(rollout, roles, how(plan=plan, estimator=estimator, kl=kl, samples_per_prompt=5))
    collisions_BR = torch.zeros(made.rewards_BR.shape)
    for row, response in enumerate(RESPONSES):
        collisions_BR[row, :response] = logits_of(roles.actor, rollout, row).softmax(-1).square().sum(-1)
    group_B = torch.zeros(5, dtype=torch.int64)
    old_BR = one_by_one(rollout, roles)["old"]
    inputs = AdvantageInputs(
        made.rewards_BR, rollout.response_lengths_B, group_B, logprobs_BR=old_BR, collisions_BR=collisions_BR
    )
    want_BR, _ = estimator.estimate(inputs, AdvantageSettings(0.9, 0.7, True, options=estimator.flags()))
    torch.testing.assert_close(made.advantages_BR, want_BR, rtol=1e-3, atol=1e-4)


def test_the_optimal_token_baseline_under_a_bypass_and_a_correction(rollout, roles):
    """Probabilities are the training forward's, also where a bypass takes the rollout's for the old ones; weights of a
    correction enter by their squares."""
    off, common = off_policy(rollout), {"estimator": ESTIMATORS["optimal_token_baseline"], "samples_per_prompt": 5}
    common["kl"] = IN_LOSS
    plain = made_from(rollout, roles, how(**common))
    bypassed = made_from(off, roles, how(**common, **corrected("none", bypass=True)))
    torch.testing.assert_close(bypassed.advantages_BR, plain.advantages_BR)
    assert torch.equal(bypassed.old_logprobs_BR, off.sampled_logprobs_BR)
    weighed = made_from(off, roles, how(**common, **corrected("truncate", "token", 2.0)))
    assert not torch.allclose(weighed.advantages_BR, plain.advantages_BR)


def test_score_norms_are_read_where_the_variance_is_reported(rollout, roles):
    made = made_from(rollout, roles, how(reports_variance=True))
    norms_BR, mask_BR = score_norms(made.read, rollout.response_mask_BR), rollout.response_mask_BR
    least_BR = (1.0 - made.old_logprobs_BR.exp()).square()  # as the sum of p^2 is at least this token's
    assert (norms_BR >= least_BR - 1e-6)[mask_BR].all() and not norms_BR[~mask_BR].any()
    assert (norms_BR <= 2.0).all() and made_from(rollout, roles, how()).read.collisions_BR is None


def beside(roles, off) -> SimpleNamespace:
    """The policy is the reference, of which log-probabilities and every second logit are read `off(target_ids_M)` units
    of float32 beside."""

    def reference(rows, readout):
        found = roles.actor(rows, readout)
        off_M = off(rows.target_ids_M) * 2.0**-23 * (1.0 + found.logprobs_M.abs())
        logits_MV = None
        if found.logits_MV is not None:
            logits_MV = found.logits_MV.clone()
            logits_MV[:, ::2] += off_M.unsqueeze(1)
        return found._replace(logprobs_M=found.logprobs_M + off_M, logits_MV=logits_MV)

    return SimpleNamespace(**{**vars(roles), "reference": reference})


def of_equal_scores(rollout: Rollout, roles, settings: ExperienceSettings, kl_coef: float):
    """Two groups of two texts each."""
    four = picked(rollout, range(4))
    scores_B = torch.tensor([0.0, 0.0, 0.3, 0.3]) if settings.estimator.needs_groups else torch.full((4,), 0.3)
    samples = Samples((), four, lambda: Scored(scores_B, scores_B, {}))
    greedy = samples if settings.estimator.needs_greedy else None
    return make_experience(samples, roles, settings, kl_coef, clock=PhaseClock(), greedy=greedy)


@pytest.mark.parametrize("advantage", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce++_baseline"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "full"])
def test_a_group_whose_kl_differs_by_rounding_has_no_advantage(rollout, roles, estimator, advantage):
    """Its scores are equal. Those of the other group are too, whose KL is one."""
    how_to = how(kl=kl_of(estimator), estimator=ESTIMATORS[advantage], samples_per_prompt=2)
    ids = rollout.response_ids_BR[:2].flatten().unique()
    moved = beside(roles, lambda ids_M: torch.where(torch.isin(ids_M, ids), ids_M % 7 - 3.0, 1e6))
    made = of_equal_scores(rollout, moved, how_to, 0.1)
    assert not made.advantages_BR[:2].any()
    assert made.rewards_BR[:2].any() or estimator == "k3"  # exp(d) - d - 1 is 0 in float32
    other_BR = made.advantages_BR[2:, 0]
    assert float(other_BR.abs().max()) > 1e-4
