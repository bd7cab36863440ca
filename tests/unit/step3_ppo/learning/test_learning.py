"""One step of actor and critic on a minibatch, and notes on the steps of a rollout."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch

from tests.support.step3_records import changed, made_experience
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from tests.unit.step3_ppo.test_trainer import Engine as DrawingEngine
from tests.unit.step3_ppo.test_trainer import made_trainer
from threestep.plugins.mismatch.arguments import MismatchArguments
from threestep.plugins.mismatch.correction import MismatchCorrection
from training.step3_ppo.contracts.records import NO_CORRECTION, Experience
from training.step3_ppo.experience.sequences import training_sequences
from training.step3_ppo.flags.algorithm import experience_settings, learning_settings, selected_algorithm
from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
from training.step3_ppo.learning import notes
from training.step3_ppo.learning.learning import Learner
from training.step3_ppo.learning.notes import NO_RESPONSE_COUNTS, NO_STEP_TAKEN, prompt_outcomes
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens, StepTotals, token_mean, value_loss
from training.utils.base.errors import Mistakes
from training.utils.contracts.guests import Guests
from training.utils.contracts.rollout import Conversations, Rollout
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout
from training.utils.models.token_model import PolicyModel, ScalarModel

CPU = torch.device("cpu")


# --- one step, with modules in place of engines


class Engine:
    """A module whose gradients are kept where they can be read."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.ranks, self.steps = module, Ranks(0, 0, 1, CPU), 0

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def train(self) -> None:
        self.module.train()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> SimpleNamespace:
        self.steps += 1
        return SimpleNamespace(figures=lambda group: {f"{group}/stepped": 1.0})

    def gradient(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None])


def made_roles(with_critic: bool) -> SimpleNamespace:
    return SimpleNamespace(
        actor_guests=Guests(),
        critic_guests=Guests(),
        actor=Engine(PolicyModel(tiny_causal_lm("llama", seed=1, dtype=torch.float64))),
        critic=Engine(ScalarModel(tiny_scalar_model("llama", seed=3, dtype=torch.float64))) if with_critic else None,
        reference=object(),
    )


def random_experience(seed: int) -> Experience:
    """Six responses of 1 to 6 tokens, float64; the second is left out of the loss."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.tensor([3, 6, 1, 4, 2, 5])
    inside_BR = torch.arange(6) < lengths_B[:, None]

    def drawn(scale: float, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(6, 6, generator=generator, dtype=torch.float64) * scale + shift) * inside_BR

    rollout = Rollout(
        prompt_ids_BP=torch.randint(3, VOCABULARY, (6, 3), generator=generator),
        prompt_mask_BP=torch.ones(6, 3, dtype=torch.bool),
        response_ids_BR=torch.randint(3, VOCABULARY, (6, 6), generator=generator),
        response_lengths_B=lengths_B,
        sampled_logprobs_BR=drawn(1.0),
        ended_B=torch.ones(6, dtype=torch.bool),
    )
    return made_experience(
        rollout=rollout,
        counts_B=torch.arange(6) != 1,
        rewards_BR=drawn(1.0),
        advantages_BR=drawn(1.0),
        old_logprobs_BR=drawn(0.5, -4.0),
        ref_logprobs_BR=drawn(0.5, -4.0),
        values_BR=drawn(1.0),
        returns_BR=drawn(1.0),
        weights_BR=drawn(0.1, 1.0),
    )


def stepped(plan: PlanSettings, made: Experience, roles: SimpleNamespace, train_actor: bool = True, beside=(), **flags):
    """Figures of one step on all six sequences."""
    ppo = PpoArguments(
        num_samples_per_prompt=2, max_answer_seq_len=6, per_device_generation_batch_size=3,
        per_device_training_batch_size=6,
    )  # fmt: skip
    correction = flags.pop("correction", NO_CORRECTION)
    algorithm = selected_algorithm(AlgorithmArguments(**flags), ppo, Mistakes(), correction=correction)
    assert algorithm is not None
    how, learning = experience_settings(algorithm, ppo, SequenceLayout(plan, 0)), learning_settings(algorithm, ppo)
    learner, sequences = Learner(roles, how, learning, 0.3, train_actor), training_sequences([made], 2, 0, 1)
    return learner.learn(sequences, 7, learner.forwards(sequences), beside=beside)


def plain_distributions(model, made: Experience, row: int) -> torch.Tensor:
    """Log-probabilities [r, V] in the states from which the response's tokens are drawn, of the sequence alone."""
    ids = torch.cat([made.rollout.prompt_of(row), made.rollout.response_of(row)])[None]
    return model(ids, use_cache=False).logits[0, 2:-1].log_softmax(-1)


def plain_logprobs(model, made: Experience, row: int) -> torch.Tensor:
    return plain_distributions(model, made, row).gather(-1, made.rollout.response_of(row)[:, None])[:, 0]


PLANS = [
    PlanSettings(1, max_rows_per_micro_batch=1),
    PlanSettings(1, max_rows_per_micro_batch=4),
    PlanSettings(1, 20, packed=True, max_row_tokens=20),
]


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_change_nothing(policy_loss, aggregation):
    flags = {"policy_loss": policy_loss, "loss_aggregation": aggregation, "kl_in": "loss", "entropy_coef": 0.1}
    own = {"cov_share": 0.2, "clip_cov_low": -1.0}  # so that some tokens are selected
    flags |= {name: value for name, value in own.items() if hasattr(POLICY_LOSSES[policy_loss].flags, name)}
    flags |= {} if policy_loss == "sapo" else {"clip_range": 0.5}
    found = []
    for plan in PLANS:
        roles = made_roles(with_critic=True)
        figures = stepped(plan, random_experience(0), roles, **flags)
        found.append((figures, roles.actor.gradient(), roles.critic.gradient()))
    for figures, actor, critic in found[1:]:
        assert figures == pytest.approx(found[0][0], rel=1e-6)
        torch.testing.assert_close(actor, found[0][1], rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(critic, found[0][2], rtol=1e-5, atol=1e-8)
    assert found[0][1].abs().max() > 1e-4


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rejected_tokens_leave_the_denominators_of_the_actor_alone(plan, aggregation):
    """Against a plain loop: the first response keeps two of its three tokens, the sixth none, the others all; the
    second does not count. The critic learns from all that count."""
    made = random_experience(0)
    kept_BR = made.rollout.response_mask_BR.clone()
    kept_BR[0, 1] = False
    kept_BR[5] = False
    left = changed(made, kept_BR=kept_BR, weights_BR=made.corrected.weights_BR * kept_BR)
    roles = made_roles(with_critic=True)
    flags = {"loss_aggregation": aggregation, "kl_in": "loss", "clip_range": 5.0}
    figures = stepped(plan, left, roles, **flags)
    critic_alone = made_roles(with_critic=True)
    stepped(plan, made, critic_alone, **flags)
    torch.testing.assert_close(roles.critic.gradient(), critic_alone.critic.gradient())

    plain, losses = tiny_causal_lm("llama", seed=1, dtype=torch.float64), []
    for row, counts in enumerate(made.counts_B.tolist()):
        logp_r, length = plain_logprobs(plain, made, row), int(made.rollout.response_lengths_B[row])
        old_r, advantages_r, weights_r = (
            field[row, :length] for field in (made.old_logprobs_BR, made.advantages_BR, made.corrected.weights_BR)
        )
        ratio_r = torch.exp(logp_r - old_r)
        free_r, held_r = -advantages_r * ratio_r, -advantages_r * ratio_r.clamp(-4.0, 6.0)
        ref_r = made.read.ref_logprobs_BR[row, :length]
        kl_r = torch.exp(ref_r - logp_r) - (ref_r - logp_r) - 1
        loss_r = torch.maximum(free_r, held_r) * weights_r + 0.3 * kl_r.clamp(max=10)
        if counts and kept_BR[row].any():
            losses.append(loss_r[kept_BR[row, :length]])
    tokens = sum(len(loss_r) for loss_r in losses)
    assert (len(losses), tokens) == (4, 2 + 1 + 4 + 2)
    expected = {
        "token-mean": sum(loss_r.sum() for loss_r in losses) / tokens,
        "seq-mean-token-sum": sum(loss_r.sum() for loss_r in losses) / 4,
        "seq-mean-token-mean": sum(loss_r.mean() for loss_r in losses) / 4,
        "seq-mean-token-sum-norm": sum(loss_r.sum() for loss_r in losses) / 6 / 4,
    }[aggregation]
    expected.backward()
    own = torch.cat([p.grad.flatten() for p in plain.parameters()])
    torch.testing.assert_close(roles.actor.gradient(), own, rtol=1e-6, atol=1e-10)
    assert figures["actor/policy_loss"] + 0.3 * figures["actor/kl_loss"] == pytest.approx(float(expected.detach()))


def forked(made: Experience) -> Experience:
    """The same drawn tokens in turns of one and two, each answered by two tokens; two of three answers come with a
    rewritten history of the prompt, in the fifth response another one, and half of what was drawn."""
    rows = []
    for row, length in enumerate(made.rollout.response_lengths_B.tolist()):
        drawn, prompt = made.rollout.response_of(row).tolist(), made.rollout.prompt_of(row).tolist()
        ids, inserted, begins, at, number = [], [], [], 0, 0
        while at < length:
            turn = drawn[at : at + 1 + number % 2]
            at, number = at + len(turn), number + 1
            ids, inserted = ids + turn, inserted + [False] * len(turn)
            if at < length:
                said = [5, 6]
                if (row + number) % 3:
                    begins.append(len(ids))
                    said = [prompt[0] + (row == 4), *prompt[1:], *drawn[:at:2], *said]
                ids, inserted = ids + said, inserted + [True] * len(said)
        rows.append((ids, inserted, begins))
    shape = len(rows), max(len(ids) for ids, _, _ in rows)
    ids_BR, inserted_BR, begins_BR = torch.zeros(shape, dtype=torch.int64), *torch.zeros(2, *shape).bool()
    sampled_BR = torch.zeros(shape)
    for row, (ids, inserted, begins) in enumerate(rows):
        ids_BR[row, : len(ids)], inserted_BR[row, : len(ids)] = torch.tensor(ids), torch.tensor(inserted)
        begins_BR[row, begins] = True
    rollout = dataclasses.replace(
        made.rollout, response_ids_BR=ids_BR, response_lengths_B=torch.tensor([len(ids) for ids, _, _ in rows]),
        sampled_logprobs_BR=sampled_BR, inserted=Conversations((), inserted_BR, begins_BR, torch.zeros(shape)),
    )  # fmt: skip
    return changed(made, rollout=rollout)


def plain_gradients(made: Experience, policy_loss: str, aggregation: str) -> list[torch.Tensor]:
    """Of actor and critic, from plain forwards of each part by itself; a conversation is one sequence of the loss."""
    actor, critic = (make("llama", seed=seed, dtype=torch.float64) for make, seed in MODELS)
    found: list[tuple[torch.Tensor, ...]] = []
    for row, sequence in enumerate(made.rollout.sequences()):
        parts = []
        for part in sequence.parts:
            ids, places = part.input_ids[None], torch.nonzero(part.is_target).flatten()
            logits = actor(ids, use_cache=False).logits[0, places - 1].log_softmax(-1)
            values = critic.score(critic.model(ids, use_cache=False)[0])[0, places - 1, 0]
            parts.append((logits.gather(-1, ids[0, places, None])[:, 0], values))
        length = sum(len(logp) for logp, _ in parts)
        names = (
            "old_logprobs_BR", "advantages_BR", "corrected.weights_BR", "read.ref_logprobs_BR", "read.values_BR",
            "returns_BR",
        )  # fmt: skip
        fields = (attrgetter(name)(made)[row, :length] for name in names)
        counted = made.counts_B[row].double().expand(length)
        found.append((*map(torch.cat, zip(*parts, strict=True)), *fields, counted, torch.full((length,), row)))
    logp, values, old, advantages, weights, ref, old_values, returns, counted, number = map(
        torch.cat, zip(*found, strict=True)
    )
    totals = StepTotals(float(counted.sum()), float(made.counts_B.sum()), 6.0)
    own = POLICY_LOSSES[policy_loss].flags
    share = AGGREGATIONS[aggregation](counted, number, totals)
    tokens, how = PolicyTokens(logp, old, advantages, number), PolicyLossSettings(0.5, 0.5, options=own and own())
    kl = (torch.exp(ref - logp) - (ref - logp) - 1).clamp(max=10)
    ((POLICY_LOSSES[policy_loss].loss(tokens, how)[0] * weights + 0.3 * kl) * share).sum().backward()
    (value_loss(values, old_values, returns, 0.2)[0] * token_mean(counted, number, totals)).sum().backward()
    gradients = [[p.grad.flatten() for p in model.parameters() if p.grad is not None] for model in (actor, critic)]
    return [torch.cat(each) for each in gradients]


MODELS = ((tiny_causal_lm, 1), (tiny_scalar_model, 3))
SHARED = PlanSettings(1, 90, packed=True, max_row_tokens=90, least_shared_tokens=1)


@pytest.mark.parametrize(
    "number, policy_loss", list(enumerate(name for name, loss in POLICY_LOSSES.items() if loss.selects is None))
)
def test_conversations_that_fork_weigh_as_conversations(number, policy_loss):
    """By every loss, against plain forwards of their parts: how rows hold them changes nothing."""
    made, aggregation = forked(random_experience(0)), list(AGGREGATIONS)[number % len(AGGREGATIONS)]
    parts = [len(each.parts) for each in made.rollout.sequences()]
    assert max(parts) > 2 and 1 in parts
    actor, critic = plain_gradients(made, policy_loss, aggregation)
    flags = {"policy_loss": policy_loss, "loss_aggregation": aggregation, "kl_in": "loss", "clip_range": 0.5}
    for plan in [*PLANS, SHARED][number % 2 :: 2]:
        roles = made_roles(with_critic=True)
        stepped(plan, made, roles, **flags)
        for engine, wanted in ((roles.actor, actor), (roles.critic, critic)):  # norms compute in float32
            assert float((engine.gradient() - wanted).norm()) < 2e-6 * float(wanted.norm())


@pytest.mark.parametrize("plan", PLANS)
def test_a_bypass_weighs_by_the_policy_of_the_update(plan):
    """REINFORCE with truncated weights of whole responses and a veto, against a plain loop: weights have no gradient,
    and the vetoed tokens stay in the denominator."""
    made = changed(random_experience(0), weights_BR=None)
    roles = made_roles(with_critic=False)
    given = MismatchArguments(mismatch_recipe="bypass_pg_is", mismatch_veto=0.05)
    bypass = MismatchCorrection(given.chosen(is_exact=True))
    stepped(plan, made, roles, advantage="grpo", kl_coef=0.0, policy_loss="gpg", correction=bypass)
    plain, total, tokens, vetoed = tiny_causal_lm("llama", seed=1, dtype=torch.float64), 0.0, 0, 0
    for row, counts in enumerate(made.counts_B.tolist()):
        logp_r, length = plain_logprobs(plain, made, row), int(made.rollout.response_lengths_B[row])
        d_r = (logp_r - made.old_logprobs_BR[row, :length]).detach()
        weight = 0.0 if (d_r.exp() < 0.05).any() else min(float(d_r.sum().exp()), 2.0)
        if counts:
            vetoed, tokens = vetoed + (weight == 0.0), tokens + length
            total = total - weight * (made.advantages_BR[row, :length] * logp_r).sum()
    assert 0 < vetoed < 5
    (total / tokens).backward()
    own = torch.cat([p.grad.flatten() for p in plain.parameters()])
    torch.testing.assert_close(roles.actor.gradient(), own, rtol=1e-6, atol=1e-10)


def test_a_response_that_does_not_count_changes_nothing():
    made = random_experience(0)
    other = changed(made, advantages_BR=made.advantages_BR.clone(), returns_BR=made.returns_BR.clone())
    other.advantages_BR[1] += 5.0
    other.returns_BR[1] -= 3.0
    gradients = []
    for one in (made, other):
        roles = made_roles(with_critic=True)
        stepped(PLANS[1], one, roles, kl_in="loss", entropy_coef=0.1)
        gradients.append((roles.actor.gradient(), roles.critic.gradient()))
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_without_old_log_probabilities_the_ratio_is_one():
    made = changed(random_experience(0), old_logprobs_BR=None, weights_BR=None)
    roles = made_roles(with_critic=False)
    figures = stepped(PLANS[1], made, roles, advantage="grpo", kl_in="loss")
    assert figures["actor/ratio"] == pytest.approx(1.0) and figures["actor/update_kl"] == 0.0
    assert figures["actor/clip_fraction"] == 0.0 and not any(name.startswith("critic") for name in figures)
    # The gradient of PPO at ratio 1 is that of -A log p.
    other = made_roles(with_critic=False)
    stepped(PLANS[1], made, other, advantage="grpo", kl_in="loss", policy_loss="gpg")
    torch.testing.assert_close(roles.actor.gradient(), other.actor.gradient(), rtol=1e-5, atol=1e-9)


def test_the_correction_weighs_each_token():
    made = random_experience(0)
    halved = changed(made, weights_BR=made.corrected.weights_BR / 2)
    found = [stepped(PLANS[1], one, made_roles(True))["actor/policy_loss"] for one in (made, halved)]
    assert found[1] == pytest.approx(found[0] / 2)


@pytest.mark.parametrize("plan", PLANS)
def test_the_exact_kl_in_the_loss_and_its_gradient(plan):
    """No advantages: what is left is 0.3 x the mean over the counted tokens of sum p (log p - log p_ref)."""
    made = random_experience(0)
    made = changed(made, advantages_BR=torch.zeros_like(made.advantages_BR), weights_BR=None)
    roles = made_roles(with_critic=False)
    roles.reference = PolicyModel(tiny_causal_lm("llama", seed=2, dtype=torch.float64))
    figures = stepped(plan, made, roles, advantage="grpo", kl_in="loss", kl_estimator="full")
    assert all(parameter.grad is None for parameter in roles.reference.parameters())
    plain, kl = tiny_causal_lm("llama", seed=1, dtype=torch.float64), []
    for row, counts in enumerate(made.counts_B.tolist()):
        if counts:
            log_p, log_q = (plain_distributions(model, made, row) for model in (plain, roles.reference.model))
            kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
    (0.3 * torch.cat(kl).mean()).backward()
    assert figures["actor/kl_loss"] == pytest.approx(float(torch.cat(kl).mean().detach()), rel=1e-6)
    names = dict(plain.named_parameters())
    for name, parameter in roles.actor.module.model.named_parameters():
        torch.testing.assert_close(parameter.grad, names[name].grad, rtol=1e-6, atol=1e-10, msg=name)


def test_critic_warm_up_leaves_the_actor_alone():
    roles = made_roles(with_critic=True)
    figures = stepped(PLANS[1], random_experience(0), roles, train_actor=False)
    assert (roles.actor.steps, roles.critic.steps) == (0, 1)
    assert not any(name.startswith("actor/") for name in figures) and figures["critic/value_loss"] > 0
    assert all(parameter.grad is None for parameter in roles.actor.module.parameters())


def test_a_step_in_which_no_response_counts_moves_nothing_and_tells_no_means():
    made = changed(random_experience(0), counts_B=torch.zeros(6, dtype=torch.bool))
    roles = made_roles(with_critic=True)
    figures = stepped(PLANS[1], made, roles, kl_in="loss", entropy_coef=0.1, policy_loss="kl_cov")
    assert figures.keys() == {"actor/stepped", "critic/stepped"}
    assert not roles.actor.gradient().any() and not roles.critic.gradient().any()


def test_tokens_of_ranks_have_a_spread(monkeypatch):
    """Ranks that computed 30 and 10 tokens."""
    monkeypatch.setattr(notes, "gathered", lambda own: [own, own._replace(total=10.0, squares=100.0, least=10.0)])
    assert notes.rank_token_figures(30) == {
        "train/rank_tokens_mean": 20.0,
        "train/rank_tokens_std": 10.0,
        "train/rank_tokens_min": 10.0,
        "train/rank_tokens_max": 30.0,
    }


def test_each_prompt_has_one_outcome():
    counts = [True, False, False, False, True, True]  # two samples of three prompts
    sequences = [SimpleNamespace(counts=own) for own in counts]
    rows = [7, 7, 8, 8, 9, 9]
    assert prompt_outcomes(rows, sequences, {0, 1, 2, 3}, 2) == [(7, None), (8, NO_RESPONSE_COUNTS), (9, NO_STEP_TAKEN)]
    assert prompt_outcomes(rows, sequences, {5}, 2) == [(7, NO_STEP_TAKEN), (8, NO_RESPONSE_COUNTS), (9, None)]
    assert [row for row, _ in prompt_outcomes(rows, sequences, set(), 1)] == rows


LENGTH = 3


def one_step(at_once: bool, ended=lambda rollout: rollout.ended_B, warmup: int = 0, **flags):
    """Return the experience, the figures and the critic's weights after a step. ended: of the responses."""
    engine = DrawingEngine(lambda prompt, sample: 6 + (prompt + sample) % 5, LENGTH)
    changed = {"learns_values": at_once, "critic_warmup": warmup}
    trainer = made_trainer(engine, advantage="gae", changed=changed, rate=0.1, **flags)
    prompts, seeds = trainer.next_prompts(1, 0)
    rollout = trainer.roll_out(prompts, seeds)
    rollout = dataclasses.replace(rollout, ended_B=ended(rollout))
    made = trainer.experience_of(trainer.score(prompts, rollout), 1)
    figures = trainer.learn([made], 1)
    return made, figures, [*trainer.roles.critic.module.parameters()]


def some(rollout):
    return torch.arange(len(rollout.ended_B)) % 3 > 0


@pytest.mark.parametrize(
    ("flags", "ended"),
    [
        ({}, some),
        ({"mask_truncated_responses": True}, some),
        ({"gamma": 0.9, "lam": 0.5}, some),
        ({"warmup": 1}, some),
    ],
)
def test_the_same_values_returns_and_weights(flags, ended):
    (apart, figures, weights), (once, figures_once, weights_once) = (
        one_step(at_once, ended, **flags) for at_once in (False, True)
    )
    assert apart.reused.values is None and once.reused.values is not None
    for name in ("advantages_BR", "returns_BR"):
        torch.testing.assert_close(getattr(once, name), getattr(apart, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(once.read.values_BR, apart.read.values_BR, rtol=1e-5, atol=1e-6)
    assert figures_once["critic/value_loss"] == pytest.approx(figures["critic/value_loss"], rel=1e-5) != 0.0
    assert figures_once["critic/clip_fraction"] == figures["critic/clip_fraction"] == 0.0
    start = list(made_trainer(DrawingEngine(), advantage="gae").roles.critic.module.parameters())
    assert any(not torch.equal(weight, first) for weight, first in zip(weights, start, strict=True))
    for once_weight, weight in zip(weights_once, weights, strict=True):
        torch.testing.assert_close(once_weight, weight, rtol=1e-5, atol=1e-6)


def test_where_nothing_counts_values_are_read_and_nothing_is_learned():
    made, figures, weights = one_step(
        True, lambda rollout: torch.zeros_like(rollout.ended_B), mask_truncated_responses=True
    )
    start = made_trainer(DrawingEngine(), advantage="gae").roles.critic.module.parameters()
    assert isinstance(made, Experience) and bool(made.read.values_BR.any())
    assert figures["train/empty_minibatches"] == 1.0 and "critic/value_loss" not in figures
    for weight, first in zip(weights, start, strict=True):
        assert torch.equal(weight, first) and weight.grad is None


def test_a_critic_that_does_not_learn_as_it_reads_has_no_learner():
    assert made_trainer(DrawingEngine(), advantage="gae").updates.value_learner(1) is None
    assert (
        made_trainer(DrawingEngine(), advantage="grpo", changed={"learns_values": True}).updates.value_learner(1)
        is None
    )
