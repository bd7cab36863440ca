"""References on the hand-worked rows of their docstrings, and beside torch, transformers and peft in float64."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from threestep.plugins.audit.references import masks
from threestep.plugins.audit.references.adamw import AdamW, RateShape, clip_factor, norm, share_of_peak
from threestep.plugins.audit.references.corrections import Rule, normalised, weights
from threestep.plugins.audit.references.estimators import best, lengths, returns, token_baseline
from threestep.plugins.audit.references.estimators import groups as advantages
from threestep.plugins.audit.references.kl import ESTIMATORS
from threestep.plugins.audit.references.llama import Llama, Slopes, why_unknown
from threestep.plugins.audit.references.logprobs import logprobs, rounded_to_bfloat16
from threestep.plugins.audit.references.policies import LOSSES as POLICIES
from threestep.plugins.audit.references.policies.clipped import clipped, value_loss
from threestep.plugins.audit.references.policies.covariance import covariances
from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens
from threestep.plugins.audit.references.preferences import LOSSES as PAIR_LOSSES
from threestep.plugins.audit.references.preferences import ResponseSums, Term, marked, ranking, schedule
from threestep.plugins.audit.references.preferences import lengths as tails
from threestep.plugins.audit.references.reductions import MISTAKES, REDUCTIONS, Units, counted_sequences
from threestep.plugins.audit.references.rewards import at_ends, shaped

pytestmark = pytest.mark.unit


F, T = False, True
OF_TOKENS = np.array([0, 0, 0, 0, 0, 1, 1, 1])


def bools(*values):
    return np.array(values, dtype=bool)


def test_the_mask_of_the_worked_example():
    data, real, first = bools(F, F, T, T, F), bools(T, T, T, T, F), bools(T, F, F, F, F)
    assert masks.loss_mask(data, real, first).tolist() == [F, F, T, T, F]
    assert masks.loss_mask(bools(T, T, T, T, T), real, first).tolist() == [F, T, T, T, F]


def test_values_move_and_runs_end_and_begin_within_their_sequence():
    values = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    assert masks.shifted(values, 1, OF_TOKENS).tolist() == [0, 1, 2, 3, 4, 0, 6, 7]
    assert masks.shifted(values, -1, OF_TOKENS).tolist() == [2, 3, 4, 5, 0, 7, 8, 0]
    mask = bools(F, T, T, F, T, T, F, T)
    assert masks.run_ends(mask, OF_TOKENS).tolist() == [F, F, T, F, T, T, F, T]
    assert masks.run_begins(mask, OF_TOKENS).tolist() == [F, T, F, F, T, T, F, T]


@pytest.mark.parametrize(("temperature", "probability"), [(1.0, 0.75), (0.5, 0.9)])
def test_two_logits_by_hand(temperature, probability):
    found = logprobs(np.array([[0.0, math.log(3.0)]]), np.array([1]), temperature)
    assert found == pytest.approx([math.log(probability)], abs=1e-12)
    # Large logits stay finite.
    assert logprobs(np.array([[1000.0, 0.0]]), np.array([1]), 1.0) == pytest.approx([-1000.0])


def test_rounding_is_that_of_torch():
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    assert rounded_to_bfloat16(values).tolist() == torch.from_numpy(values).bfloat16().double().tolist()


LOG2 = math.log(2.0)


@pytest.mark.parametrize(("name", "right"), [("k1", -LOG2), ("k2", LOG2**2 / 2), ("k3", 1.0 - LOG2), ("abs", LOG2)])
def test_estimators_by_hand(name, right):
    half, one = np.log(np.array([0.5, 0.25])), np.log(np.array([1.0, 0.25]))
    assert ESTIMATORS[name](half, one) == pytest.approx([right, 0.0])


def test_rewards_by_hand():
    scores, lengths = np.array([1.5, -2.0]), np.array([2, 1])
    assert shaped(scores, np.array([2.0, 1.0, 0.0]), lengths, 0.1) == pytest.approx([-0.2, 1.4, -2.0])
    assert at_ends(scores, lengths, back=1).tolist() == [1.5, 0.0, -2.0]
    assert at_ends(scores, lengths, back=99).tolist() == [1.5, 0.0, -2.0]


# Sequences (2 4), (6), (no token that counts); micro-batches: the first two, the third; ranks: the first, the others.
UNITS = Units(
    values_U=np.array([2.0, 4.0, 6.0, 9.0]),
    weights_U=np.array([1.0, 1.0, 1.0, 0.0]),
    sequence_U=np.array([0, 0, 1, 2]),
    micro_U=np.array([0, 0, 1, 1]),
    rank_U=np.array([0, 0, 1, 1]),
    micro_batches=2,
    ranks=2,
    longest=4.0,
    full=3.0,
)


@pytest.mark.parametrize(
    ("name", "right"),
    [("token mean", 4.0), ("sequence mean", 4.5), ("sequence sum", 6.0), ("sequence sum norm", 1.5)],
)
def test_reductions_by_hand(name, right):
    assert REDUCTIONS[name](UNITS) == right
    assert counted_sequences(UNITS) == 2


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("sum over micro-batches", 4.5),
        ("mean over micro-batches", (3.0 + 6.0) / 2),
        ("ranks of their own", (3.0 + 6.0) / 2),
        ("sequences of their means", 4.5),
        ("with those in which no token", 4.5 * 2 / 3),
        ("all tokens alike", 4.0),
        ("sum of each sequence", 6.0),
        ("divided by nothing", 12.0),
        ("one token more", 12.0 / 5),
        ("count of all tokens", 3.0),
        ("partial accumulation divided", 4.5 / 3),
        ("of which this step has fewer", 4.0 / 3),
        ("not divided by the number of micro", 4.0),
        ("micro-batches once more", 4.0),
        ("ranks once more", 2.0),
        ("multiplied by the number of ranks", 8.0),
        ("last micro-batch alone", 6.0),
        ("first rank alone", 3.0),
    ],
)
def test_mistakes_by_hand(words, wrong):
    [mistake] = [compute for sentence, compute in MISTAKES.items() if words in sentence]
    assert mistake(UNITS, REDUCTIONS["token mean"]) == pytest.approx(wrong)
    assert len(MISTAKES) == 18  # each has a line here


GROUP = np.array([7, 3, 7, 3, 9])
OUTCOME = np.array([1.0, 5.0, 0.0, 5.0, 2.0])


def test_groups_in_any_order():
    assert advantages.group_mean(OUTCOME, GROUP).tolist() == [0.5, 5.0, 0.5, 5.0, 2.0]
    std = advantages.group_std(OUTCOME, GROUP, 1.0)
    assert std == pytest.approx([math.sqrt(0.5), 0.0, math.sqrt(0.5), 0.0, 0.0])
    assert advantages.group_std(OUTCOME, GROUP, 0.0)[0] == pytest.approx(0.5)
    root = math.sqrt(0.5)
    assert advantages.grpo(OUTCOME, GROUP, std, 1e-9) == pytest.approx([root, 0.0, -root, 0.0, 0.0])
    assert advantages.rloo(OUTCOME, GROUP).tolist() == [1.0, 0.0, -1.0, 0.0, 0.0]


def test_gae_of_two_responses():
    rewards, values = np.array([1.0, 2.0, 1.0]), np.array([0.5, 1.0, 0.25])
    found = advantages.gae(rewards, values, np.array([2, 1]), gamma=0.5, lam=0.5)
    # The second response first: 1 - 0.25. Then 2 - 1 = 1, and 1 + 0.5 x 1 - 0.5 + 0.25 x 1 = 1.25.
    assert found == pytest.approx([1.25, 1.0, 0.75])
    bootstrapped = advantages.gae(rewards, values, np.array([2, 1]), gamma=0.5, lam=0.5, last_B=np.array([0.0, 0.25]))
    assert bootstrapped == pytest.approx([1.25, 1.0, 0.875])


def test_whitening():
    values, counts = np.array([1.0, 3.0, 50.0]), np.array([True, True, False])
    assert advantages.whitened(values, counts) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0.0], abs=1e-7)
    # With two zeros: mean 1, squares 0 + 4 + 1 + 1 over 3.
    assert advantages.whitened(values, counts, more_zeros=2.0) == pytest.approx([0.0, math.sqrt(2.0), 0.0], abs=1e-7)
    assert advantages.whitened(values, counts, ddof=0.0)[1] == pytest.approx(1.0)
    assert advantages.whitened(np.ones(3), np.ones(3, dtype=bool)).tolist() == [0.0, 0.0, 0.0]
    assert advantages.whitened(values, np.array([True, False, False])).tolist() == [0.0, 0.0, 0.0]


PAIRED = np.array([5, 5, 2, 2])


def test_rewards_to_go():
    assert returns.to_go(np.array([1.0, 2.0, 3.0]), np.array([2, 1]), 0.5).tolist() == [2.0, 2.0, 3.0]
    assert returns.remax(np.array([1.0]), np.array([1]), np.array([0.25])).tolist() == [0.75]


def test_the_length_weighted_baseline():
    found = lengths.opo(np.array([1.0, 0.0, 3.0, 3.0]), PAIRED, np.array([1, 3, 1, 9]))
    assert found == pytest.approx([0.75, -0.25, 0.0, 0.0])


def test_the_best_of_a_group():
    assert best.passk(np.array([3.0, 1.0, 2.0, 7.0]), np.array([0, 0, 0, 1])).tolist() == [1.0, 0.0, 0.0, 0.0]
    apart = np.array([True, True, False, False])
    assert best.gpg(np.array([1.0, 0.0, 2.0, 2.0]), PAIRED, apart).tolist() == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize(("zero_tail", "tail"), [(True, 2.0), (False, 0.0)])
def test_the_optimal_token_baseline(zero_tail, tail):
    """Returns 1 and 0 at the first token, w 1 and 3: baseline 1/4. The longer response goes on alone."""
    rewards, energy = np.array([1.0, -2.0, 2.0]), np.array([1.0, 3.0, 3.0])
    found = token_baseline.optimal(rewards, energy, np.array([1, 2]), np.array([0, 0]), zero_tail=zero_tail)
    assert found == pytest.approx([0.75, -0.25, tail])
    plain = token_baseline.optimal(rewards, 0 * energy, np.array([1, 2]), np.array([0, 0]))
    assert plain[:2] == pytest.approx([0.5, -0.5])


APART, SAME = np.log(np.array([2.0, 0.25])), np.zeros(2, dtype=np.int64)


@pytest.mark.parametrize(
    ("rule", "right"),
    [
        (Rule("truncate", most=1.5), [1.5, 0.25]),
        (Rule("truncate", most=1.5, least=0.5), [1.5, 0.5]),
        (Rule("truncate", "sequence", 1.5), [0.5, 0.5]),
        (Rule("truncate", "geometric", 1.5), [0.5**0.5] * 2),
        (Rule("mask", most=4.0), [2.0, 0.25]),
        (Rule("mask", most=2.0), [2.0, 0.0]),
    ],
)
def test_weights_by_hand(rule, right):
    assert weights(APART, SAME, rule) == pytest.approx(right)


def test_normalised_weights():
    counts = np.array([True, True, False])
    found = normalised(np.array([1.0, 3.0, 9.0]), np.array([0, 1, 1]), counts, "token")
    assert found == pytest.approx([0.5, 1.5, 4.5])
    by_response = normalised(np.array([1.0, 3.0, 3.0]), np.array([0, 1, 1]), np.ones(3, dtype=bool), "sequence")
    assert by_response == pytest.approx([0.5, 1.5, 1.5])


BOTH, ONE = np.array([True, True]), np.ones(2)


def tokens(log_ratio: list[float], advantage: np.ndarray = ONE, new: float = -1.0) -> Tokens:
    """Two tokens of one sequence."""
    new_T = np.full(2, new)
    return Tokens(new_T, new_T, new_T - np.array(log_ratio), advantage, BOTH, np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize(
    ("name", "given", "bounds", "right"),
    [
        ("ppo", tokens([math.log(2.0), 0.0]), Bounds(), [-1.2, -1.0]),
        ("ppo", tokens([math.log(8.0), 0.0], -ONE), Bounds(dual=3.0), [3.0, 1.0]),
        ("gspo", tokens([0.2, 0.0]), Bounds(1.0, 1.0), [-math.exp(0.1)] * 2),
        ("cispo", tokens([math.log(2.0), 0.0]), Bounds(0.5, 0.5), [1.5, 1.0]),
        ("geo_mean", tokens([0.6, 0.0]), Bounds(0.4, 0.4), [-math.exp(0.2)] * 2),
        ("sapo", tokens([0.0, 0.0]), Bounds(), [-2.0, -2.0]),
        ("gpg", tokens([0.5, 0.5], 2 * ONE), Bounds(), [2.0, 2.0]),
    ],
)
def test_losses_by_hand(name, given, bounds, right):
    assert POLICIES[name](given, bounds) == pytest.approx(right)


def test_selected_tokens_are_treated_apart():
    own = replace(tokens([0.5, 0.5]), selected_T=np.array([True, False]))
    ratio = math.exp(0.5)
    assert POLICIES["kl_cov"](own, Bounds(penalty=0.2)) == pytest.approx([-ratio + 0.1, -ratio])
    assert POLICIES["clip_cov"](own, Bounds()) == pytest.approx([0.0, -1.2])
    found = covariances(np.array([1.0, -1.0, 9.0]), np.array([-1.0, -3.0, 0.0]), np.array([True, True, False]))
    assert found[:2].tolist() == [1.0, 1.0]


def test_what_has_no_gradient_is_held():
    """CISPO's weight stays while log p moves; GSPO's ratio moves with the token alone."""
    own = tokens([math.log(2.0), 0.0])
    moved = replace(own, new_T=own.new_T + 0.1)
    assert POLICIES["cispo"](moved, Bounds(0.5, 0.5)) == pytest.approx([1.35, 0.9])
    mean = 0.5 * math.log(2.0)
    assert POLICIES["gspo"](moved, Bounds(9.0, 9.0)) == pytest.approx([-math.exp(mean + 0.1)] * 2)


def test_the_clip_takes_the_smaller_surrogate():
    ratio, advantage = np.array([2.0, 2.0, 0.5, 0.5, 1.0]), np.array([1.0, -1.0, 1.0, -1.0, 3.0])
    assert clipped(ratio, advantage, 0.2, 0.2) == pytest.approx([-1.2, 2.0, -0.5, 0.8, -3.0])
    assert clipped(ratio, advantage, 0.2, 0.28)[0] == pytest.approx(-1.28)
    assert clipped(ratio, advantage, 0.2, 0.2, dual=1.5) == pytest.approx([-1.2, 1.5, -0.5, 0.8, -3.0])


def test_the_value_is_held_near_the_old_one():
    found = value_loss(np.array([2.0, 0.2]), np.zeros(2), np.array([1.0, 2.0]), 0.5)
    assert found == pytest.approx([0.5, 1.62])  # max(1, 0.25) / 2; (0.2 - 2)^2 / 2


# One pair of 3 tokens each: w -0.5 -1 -1.5, its reference -0.7 -1.1 -1.6; l -1 -2 -0.5, its reference -0.8 -1.4 -0.7.
SUMS, REFERENCE = np.array([-3.0, -3.5]), np.array([-3.4, -2.9])
PAIR = ResponseSums(SUMS, SUMS, REFERENCE, np.array([3.0, 3.0]), np.array([0]), np.array([1]))
TERM = Term(0.1, gamma=0.5, alpha=0.0)


@pytest.mark.parametrize(
    ("name", "term", "right"),
    [
        ("sigmoid", TERM, 0.644397),
        ("sigmoid_norm", TERM, 0.676619),
        ("robust", replace(TERM, smoothing=0.1), 0.631897),
        ("ipo", TERM, 21.777778),
        ("hinge", TERM, 0.9),
        ("apo_zero", TERM, 0.975006),
        ("apo_down", TERM, 0.985019),
        ("simpo", replace(TERM, beta=2.0), 0.779949),
        ("cpo", TERM, 0.668460),
        ("cpo", replace(TERM, alpha=2.0), 2.668460),
        ("orpo", TERM, 1.057496),
        ("sft", TERM, 1.0),
        ("plackett_luce", TERM, 0.644397),
    ],
)
def test_losses_of_pairs_by_hand(name, term, right):
    assert PAIR_LOSSES[name](PAIR, term) == pytest.approx([right], abs=1e-6)


def test_marked_responses_by_hand():
    own = replace(PAIR, good_S=np.array([True, False]))
    assert PAIR_LOSSES["kto"](own, TERM) == pytest.approx([0.490001, 0.485005], abs=1e-6)
    assert PAIR_LOSSES["kto"](own, replace(TERM, point=0.3)) == pytest.approx([0.497500, 0.477515], abs=1e-6)
    weighted = PAIR_LOSSES["kto"](own, replace(TERM, weights=(2.0, 3.0)))
    assert weighted == pytest.approx([2 * 0.490001, 3 * 0.485005], abs=1e-5)
    # -log sigmoid(0.04) and -log sigmoid(0.06).
    right = [math.log1p(math.exp(-0.04)), math.log1p(math.exp(-0.06))]
    assert PAIR_LOSSES["bco"](own, TERM) == pytest.approx(right)


def test_points_of_marked_responses():
    assert [marked.kto_point(np.array(values)) for values in ([-1.0, 3.0], [-3.0, 1.0], [])] == [
        1.0,
        0.0,
        0.0,
    ]
    assert marked.bco_point(np.array([2.0, -1.0]), np.array([True, False])) == 0.5
    assert marked.bco_point(np.array([2.0, 4.0]), np.array([True, True])) == 3.0


def test_weights_beyond_the_shortest_response():
    """A prompt of responses of 1 and 3 tokens, and one of a single response, after a prompt token each."""
    mask = np.array([False, True, False, True, True, True, False, True, True])
    sequence, prompt = np.array([0, 0, 1, 1, 1, 1, 2, 2, 2]), np.array([4, 4, 9])
    found = tails.tail_weights(mask, sequence, prompt, np.array([1.0, 3.0, 2.0]), alpha=0.4)
    assert found[mask].tolist() == [1.0, 1.0, 0.4, 0.4, 1.0, 1.0]


def test_a_prompts_likelihood_counts_once():
    """Three ranked responses make three pairs of weight 1/3; the best is chosen in two of them."""
    shares = np.array([1.5, 1.5, 3.0])
    sums, chosen, rejected = np.array([-2.0, -3.0, -4.0]), np.array([0, 0, 1]), np.array([1, 2, 2])
    own = ResponseSums(sums, sums, np.zeros(3), np.ones(3), chosen, rejected, shares)
    assert PAIR_LOSSES["sft"](own, TERM).sum() / 3 == pytest.approx(2.0)


def test_a_ranking_of_three_by_hand():
    rewards, chosen, rejected = np.array([2.0, 1.0, 0.0]), np.array([0, 0, 1]), np.array([1, 2, 2])
    own = ResponseSums(rewards, rewards, np.zeros(3), np.ones(3), chosen, rejected, np.array([1.5, 1.5, 3.0]))
    found = PAIR_LOSSES["plackett_luce"](own, TERM) / 3
    assert [found[:2].sum(), found[2]] == pytest.approx([1.001943, 0.644397], abs=1e-6)


@pytest.mark.parametrize(("cosine", "middle"), [(False, 1.5), (True, 1.0 + 2.0 * (0.5 - 0.5 * math.sqrt(0.5)))])
def test_beta_over_the_steps(cosine, middle):
    found = [schedule.beta_at(step, 5, 1.0, 3.0, cosine=cosine) for step in (1, 2, 5)]
    assert found == pytest.approx([1.0, middle, 3.0])


def test_the_ranking_loss_with_its_options():
    one = np.ones(1)
    assert ranking.ranking_loss(one, one, 0 * one) == pytest.approx([math.log(2.0)])
    smoothed = ranking.ranking_loss(2 * one, one, 0.5 * one, smoothing=0.25, centring=0.1)
    right = 0.75 * math.log1p(math.exp(-0.5)) + 0.25 * math.log1p(math.exp(0.5)) + 0.1 * 9.0
    assert smoothed == pytest.approx([right])


def test_updates_are_torchs_in_float64():
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    first = second = np.zeros(2)
    for update, gradient in enumerate(([0.5, -1.0], [-0.25, 4.0], [0.0, 1.0])):
        before, given = weight.detach().numpy().copy(), np.array(gradient)
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        found = AdamW(0.01, 0.8, 0.95, 1e-6, 0.1, updates_before=update).after(before, given, first, second)
        assert found == pytest.approx(weight.detach().numpy(), abs=1e-15)
        first, second = 0.8 * first + 0.2 * given, 0.95 * second + 0.05 * given**2


def test_the_norm_and_clipping():
    assert norm([np.array([[3.0]]), np.array([4.0])]) == 5.0
    assert [clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(4.0, 0.0)] == [0.25, 1.0, 1.0]


SHAPES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt")


@pytest.mark.parametrize("name", SHAPES)
def test_schedules_are_those_of_transformers(name):
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(theirs, optimizer, 3, 10)
    for step in range(10):
        found = share_of_peak(name, step, RateShape(3, 10))
        # Their polynomial ends at 1e-7.
        assert found == pytest.approx(scheduler.get_last_lr()[0], abs=2e-7 if name == "polynomial" else 1e-12)
        optimizer.step()
        scheduler.step()


def test_floors_and_the_stable_part():
    """wsd over 10 steps, half of them stable: 1 at step 4, half a cosine from 5 on, 0.2 + 0.8 / 2 in its middle."""
    shape = RateShape(0, 10, least=0.2, stable=0.5)
    assert share_of_peak("wsd", 4, shape) == 1.0 and share_of_peak("wsd", 7.5, shape) == pytest.approx(0.6)
    assert share_of_peak("linear", 1, RateShape(2, 10, init=0.5)) == 0.75


SHAPE = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.5,
}  # fmt: skip
SEQUENCES = [np.array([3, 1, 4, 1, 5]), np.array([9, 2, 6])]


def model_of(kind: str, **changes: object) -> torch.nn.Module:
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{'Qwen2' if kind == 'qwen2' else 'Llama'}Config")(**{**SHAPE, **changes})
    name = {"qwen2": "Qwen2ForCausalLM", "score": "LlamaForSequenceClassification"}.get(kind, "LlamaForCausalLM")
    model = getattr(transformers, name)(config).double()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def reference_of(model: torch.nn.Module, **more: object) -> Llama:
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return Llama(weights, json.loads(model.config.to_json_string()) | more)


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {})])
def test_logits_and_gradients_are_transformers(kind, changes):
    model = model_of(kind, **changes)
    read, terms = [], torch.zeros((), dtype=torch.float64)
    slopes = Slopes(*np.random.default_rng(1).normal(size=(3, 8)), temperature=0.7)
    begin = 0
    for ids in SEQUENCES:
        logits = torch.nn.functional.pad(model(torch.tensor(ids)[None]).logits[0, :-1], (0, 0, 1, 0))
        read.append(logits.detach().numpy())
        scaled = logits / 0.7
        own = slice(begin, begin + len(ids))
        begin += len(ids)
        log_p = scaled.log_softmax(-1)
        parts = {
            "logprobs_T": log_p.gather(1, torch.tensor(ids)[:, None])[:, 0],
            "normalizers_T": scaled.logsumexp(-1),
            "entropies_T": -(log_p.exp() * log_p).sum(-1),
        }
        for name, values in parts.items():
            terms = terms + (torch.tensor(getattr(slopes, name)[own]) * values).sum()
    terms.backward()
    reference = reference_of(model)
    assert reference.logits(SEQUENCES) == pytest.approx(np.concatenate(read), abs=2e-5)
    found, sizes = reference.gradients(SEQUENCES, slopes)
    for name, weight in model.named_parameters():
        assert found[name] == pytest.approx(weight.grad.numpy(), abs=5e-4), name
        assert (sizes[name] >= np.abs(found[name]) - 1e-12).all()


def test_scores_are_transformers():
    model = model_of("score", num_labels=1, pad_token_id=0)
    right = [model(torch.tensor(ids)[None]).logits.squeeze() for ids in SEQUENCES]
    assert reference_of(model).scores(SEQUENCES) == pytest.approx([float(one) for one in right], abs=2e-5)
    (2.0 * right[0] - right[1]).backward()
    found, _ = reference_of(model).gradients(SEQUENCES, Slopes(scores_S=np.array([2.0, -1.0])))
    assert found["score.weight"] == pytest.approx(model.score.weight.grad.numpy(), abs=5e-4)


def test_adapters_are_pefts():
    from peft import LoraConfig

    model = model_of("llama")
    model.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.double()
    right = model(torch.tensor(SEQUENCES[0])[None]).logits[0, :-1].detach().numpy()
    assert reference_of(model, lora_scale=3.0).logits(SEQUENCES[:1])[1:] == pytest.approx(right, abs=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "a reference of gpt2"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary embeddings of the type yarn"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"sliding_window": 8}, "sliding windows"),
    ],
)
def test_other_models_are_named(changes, words):
    assert words in why_unknown({"model_type": "llama", **changes}) and not why_unknown({"model_type": "llama"})
