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


def a(*numbers):
    return np.array(numbers, dtype=float)


def places(*numbers):
    return np.array(numbers, dtype=int)


def bits(word):
    """T is True."""
    return np.array([letter == "T" for letter in word])


LOG2, ROOT, E = math.log(2.0), math.sqrt(0.5), math.exp(1.0)

# --- masks, log-probabilities, KL, rewards

DATA, REAL, FIRST, RUNS = bits("..TT."), bits("TTTT."), bits("T...."), bits(".TT.TT.T")
OF_TOKENS = places(0, 0, 0, 0, 0, 1, 1, 1)
ONE_TO_8, HALF, WHOLE = np.arange(1, 9), np.log(a(0.5, 0.25)), np.log(a(1.0, 0.25))
TOKENS = {
    "the mask": (lambda: masks.loss_mask(DATA, REAL, FIRST), bits("..TT.")),
    "the mask of all tokens": (lambda: masks.loss_mask(bits("TTTTT"), REAL, FIRST), bits(".TTT.")),
    "moved on": (lambda: masks.shifted(ONE_TO_8, 1, OF_TOKENS), [0, 1, 2, 3, 4, 0, 6, 7]),
    "moved back": (lambda: masks.shifted(ONE_TO_8, -1, OF_TOKENS), [2, 3, 4, 5, 0, 7, 8, 0]),
    "ends of runs": (lambda: masks.run_ends(RUNS, OF_TOKENS), bits("..T.TT.T")),
    "begins of runs": (lambda: masks.run_begins(RUNS, OF_TOKENS), bits(".T..TT.T")),
    "two logits": (lambda: logprobs(a([0.0, math.log(3.0)]), places(1), 1.0), [math.log(0.75)]),
    "two logits, colder": (lambda: logprobs(a([0.0, math.log(3.0)]), places(1), 0.5), [math.log(0.9)]),
    "large logits": (lambda: logprobs(a([1000.0, 0.0]), places(1), 1.0), [-1000.0]),
    "k1": (lambda: ESTIMATORS["k1"](HALF, WHOLE), [-LOG2, 0.0]),
    "k2": (lambda: ESTIMATORS["k2"](HALF, WHOLE), [LOG2**2 / 2, 0.0]),
    "k3": (lambda: ESTIMATORS["k3"](HALF, WHOLE), [1.0 - LOG2, 0.0]),
    "abs": (lambda: ESTIMATORS["abs"](HALF, WHOLE), [LOG2, 0.0]),
    "rewards": (lambda: shaped(a(1.5, -2.0), a(2.0, 1.0, 0.0), places(2, 1), 0.1), [-0.2, 1.4, -2.0]),
    "one token early": (lambda: at_ends(a(1.5, -2.0), places(2, 1), back=1), [1.5, 0.0, -2.0]),
    "on the first token": (lambda: at_ends(a(1.5, -2.0), places(2, 1), back=99), [1.5, 0.0, -2.0]),
}

# --- reductions: sequences (2 4), (6), (no token that counts); micro-batches and ranks: the first two, the others

UNITS = Units(
    a(2.0, 4.0, 6.0, 9.0), a(1.0, 1.0, 1.0, 0.0), places(0, 0, 1, 2), places(0, 0, 1, 1), places(0, 0, 1, 1),
    micro_batches=2, ranks=2, longest=4.0, full=3.0,
)  # fmt: skip
REDUCED = {"token mean": 4.0, "sequence mean": 4.5, "sequence sum": 6.0, "sequence sum norm": 1.5}
WRONG = {
    "sum over micro-batches": 4.5,
    "mean over micro-batches": (3.0 + 6.0) / 2,
    "ranks of their own": (3.0 + 6.0) / 2,
    "sequences of their means": 4.5,
    "including those in which no token": 4.5 * 2 / 3,
    "all tokens alike": 4.0,
    "sum of each sequence": 6.0,
    "divided by nothing": 12.0,
    "one extra token": 12.0 / 5,
    "count of all tokens": 3.0,
    "partial accumulation divided": 4.5 / 3,
    "of which this step has fewer": 4.0 / 3,
    "not divided by the number of micro": 4.0,
    "micro-batches once more": 4.0,
    "ranks once more": 2.0,
    "multiplied by the number of ranks": 8.0,
    "last micro-batch alone": 6.0,
    "first rank alone": 3.0,
}


@pytest.mark.parametrize("words", WRONG)
def test_mistakes_by_hand(words):
    assert len(MISTAKES) == len(WRONG)
    [mistake] = [compute for sentence, compute in MISTAKES.items() if words in sentence]
    assert mistake(UNITS, REDUCTIONS["token mean"]) == pytest.approx(WRONG[words])


# --- advantages

GROUP, OUTCOME, PAIRED, TWO = places(7, 3, 7, 3, 9), a(1.0, 5.0, 0.0, 5.0, 2.0), places(5, 5, 2, 2), places(2, 1)
GAE, BEHIND = {"gamma": 0.5, "lam": 0.5}, {"gamma": 0.5, "lam": 0.5, "last_B": a(0.0, 0.25)}
VALUES, COUNTS = a(1.0, 3.0, 50.0), bits("TT.")
REWARDS, ENERGY, ONE_GROUP = a(1.0, -2.0, 2.0), a(1.0, 3.0, 3.0), places(0, 0)
ADVANTAGES = {
    "means of groups": (lambda: advantages.group_mean(OUTCOME, GROUP), [0.5, 5.0, 0.5, 5.0, 2.0]),
    "deviations of groups": (lambda: advantages.group_std(OUTCOME, GROUP, 1.0), [ROOT, 0.0, ROOT, 0.0, 0.0]),
    "deviations, ddof 0": (lambda: advantages.group_std(OUTCOME, GROUP, 0.0)[:1], [0.5]),
    "grpo": (
        lambda: advantages.grpo(OUTCOME, GROUP, advantages.group_std(OUTCOME, GROUP, 1.0), 1e-9),
        [ROOT, 0.0, -ROOT, 0.0, 0.0],
    ),
    "rloo": (lambda: advantages.rloo(OUTCOME, GROUP), [1.0, 0.0, -1.0, 0.0, 0.0]),
    # The second response first: 1 - 0.25. Then 2 - 1 = 1, and 1 + 0.5 x 1 - 0.5 + 0.25 x 1 = 1.25.
    "gae": (lambda: advantages.gae(a(1.0, 2.0, 1.0), a(0.5, 1.0, 0.25), TWO, **GAE), [1.25, 1.0, 0.75]),
    "gae, a value behind": (
        lambda: advantages.gae(a(1.0, 2.0, 1.0), a(0.5, 1.0, 0.25), TWO, **BEHIND), [1.25, 1.0, 0.875],
    ),
    "whitened": (lambda: advantages.whitened(VALUES, COUNTS), [-ROOT, ROOT, 0.0]),
    # With two zeros: mean 1, squares 0 + 4 + 1 + 1 over 3.
    "whitened with zeros": (lambda: advantages.whitened(VALUES, COUNTS, more_zeros=2.0), [0.0, math.sqrt(2.0), 0.0]),
    "whitened, ddof 0": (lambda: advantages.whitened(VALUES, COUNTS, ddof=0.0), [-1.0, 1.0, 0.0]),
    "equal ones whitened": (lambda: advantages.whitened(np.ones(3), bits("TTT")), [0.0, 0.0, 0.0]),
    "one whitened": (lambda: advantages.whitened(VALUES, bits("T..")), [0.0, 0.0, 0.0]),
    "rewards to go": (lambda: returns.to_go(a(1.0, 2.0, 3.0), TWO, 0.5), [2.0, 2.0, 3.0]),
    "remax": (lambda: returns.remax(a(1.0), places(1), a(0.25)), [0.75]),
    "opo": (lambda: lengths.opo(a(1.0, 0.0, 3.0, 3.0), PAIRED, places(1, 3, 1, 9)), [0.75, -0.25, 0.0, 0.0]),
    "the best of k": (lambda: best.passk(a(3.0, 1.0, 2.0, 7.0), places(0, 0, 0, 1)), [1.0, 0.0, 0.0, 0.0]),
    "gpg": (lambda: best.gpg(a(1.0, 0.0, 2.0, 2.0), PAIRED, bits("TT..")), [1.0, -1.0, 0.0, 0.0]),
    # Returns 1 and 0 at the first token, w 1 and 3: baseline 1/4. The longer response goes on alone.
    "the optimal token baseline": (
        lambda: token_baseline.optimal(REWARDS, ENERGY, places(1, 2), ONE_GROUP, zero_tail=True), [0.75, -0.25, 2.0],
    ),
    "with a tail": (
        lambda: token_baseline.optimal(REWARDS, ENERGY, places(1, 2), ONE_GROUP, zero_tail=False), [0.75, -0.25, 0.0],
    ),
    "of equal weights": (
        lambda: token_baseline.optimal(REWARDS, 0 * ENERGY, places(1, 2), ONE_GROUP)[:2], [0.5, -0.5],
    ),
}  # fmt: skip

# --- weights against a mismatch

APART, SAME = np.log(a(2.0, 0.25)), places(0, 0)
BY_TOKEN = (a(1.0, 3.0, 9.0), places(0, 1, 1), bits("TT."), "token")
CORRECTIONS = {
    "cut": (lambda: weights(APART, SAME, Rule("truncate", most=1.5)), [1.5, 0.25]),
    "cut on both sides": (lambda: weights(APART, SAME, Rule("truncate", most=1.5, least=0.5)), [1.5, 0.5]),
    "of sequences": (lambda: weights(APART, SAME, Rule("truncate", "sequence", 1.5)), [0.5, 0.5]),
    "of geometric means": (lambda: weights(APART, SAME, Rule("truncate", "geometric", 1.5)), [ROOT, ROOT]),
    "within the mask": (lambda: weights(APART, SAME, Rule("mask", most=4.0)), [2.0, 0.25]),
    "masked": (lambda: weights(APART, SAME, Rule("mask", most=2.0)), [2.0, 0.0]),
    "normalised": (lambda: normalised(*BY_TOKEN), [0.5, 1.5, 4.5]),
    "normalised by response": (
        lambda: normalised(a(1.0, 3.0, 3.0), places(0, 1, 1), bits("TTT"), "sequence"), [0.5, 1.5, 1.5],
    ),
}  # fmt: skip

# --- losses of a policy and of a critic


def tokens(log_ratio, advantage=1.0, new=-1.0, **more):
    """Two tokens of one sequence. new: of log-probabilities, moved on from -1 where the ratio was taken."""
    new_T = np.full(2, -1.0)
    own = Tokens(new_T, new_T, new_T - a(*log_ratio), np.full(2, advantage), bits("TT"), places(0, 0))
    return replace(own, new_T=np.full(2, new), **more)


RATIO, ADVANTAGE = a(2.0, 2.0, 0.5, 0.5, 1.0), a(1.0, -1.0, 1.0, -1.0, 3.0)
SELECTED = tokens([0.5, 0.5], selected_T=bits("T."))
OF_POLICY = {
    "ppo": (lambda: POLICIES["ppo"](tokens([LOG2, 0.0]), Bounds()), [-1.2, -1.0]),
    "ppo, dual clip": (lambda: POLICIES["ppo"](tokens([3 * LOG2, 0.0], -1.0), Bounds(dual=3.0)), [3.0, 1.0]),
    "gspo": (lambda: POLICIES["gspo"](tokens([0.2, 0.0]), Bounds(1.0, 1.0)), [-(E**0.1)] * 2),
    "cispo": (lambda: POLICIES["cispo"](tokens([LOG2, 0.0]), Bounds(0.5, 0.5)), [1.5, 1.0]),
    "geo_mean": (lambda: POLICIES["geo_mean"](tokens([0.6, 0.0]), Bounds(0.4, 0.4)), [-(E**0.2)] * 2),
    "sapo": (lambda: POLICIES["sapo"](tokens([0.0, 0.0]), Bounds()), [-2.0, -2.0]),
    "gpg": (lambda: POLICIES["gpg"](tokens([0.5, 0.5], 2.0), Bounds()), [2.0, 2.0]),
    "kl_cov": (lambda: POLICIES["kl_cov"](SELECTED, Bounds(penalty=0.2)), [0.1 - E**0.5, -(E**0.5)]),
    "clip_cov": (lambda: POLICIES["clip_cov"](SELECTED, Bounds()), [0.0, -1.2]),
    "covariances": (lambda: covariances(a(1.0, -1.0, 9.0), a(-1.0, -3.0, 0.0), COUNTS)[:2], [1.0, 1.0]),
    # What has no gradient is held: CISPO's weight stays while log p moves; GSPO's ratio moves with the token alone.
    "cispo, moved": (lambda: POLICIES["cispo"](tokens([LOG2, 0.0], new=-0.9), Bounds(0.5, 0.5)), [1.35, 0.9]),
    "gspo, moved": (
        lambda: POLICIES["gspo"](tokens([LOG2, 0.0], new=-0.9), Bounds(9.0, 9.0)), [-(E ** (LOG2 / 2 + 0.1))] * 2,
    ),
    "clipped": (lambda: clipped(RATIO, ADVANTAGE, 0.2, 0.2), [-1.2, 2.0, -0.5, 0.8, -3.0]),
    "clipped higher": (lambda: clipped(RATIO, ADVANTAGE, 0.2, 0.28)[:1], [-1.28]),
    "clipped twice": (lambda: clipped(RATIO, ADVANTAGE, 0.2, 0.2, dual=1.5), [-1.2, 1.5, -0.5, 0.8, -3.0]),
    # The value is held near the old one: max(1, 0.25) / 2; (0.2 - 2)^2 / 2.
    "values": (lambda: value_loss(a(2.0, 0.2), np.zeros(2), a(1.0, 2.0), 0.5), [0.5, 1.62]),
}  # fmt: skip

# --- losses of pairs and of marked responses: one pair of 3 tokens each: w -0.5 -1 -1.5, its reference -0.7 -1.1 -1.6;
# l -1 -2 -0.5, its reference -0.8 -1.4 -0.7

SUMS, REFERENCE = a(-3.0, -3.5), a(-3.4, -2.9)
PAIR = ResponseSums(SUMS, SUMS, REFERENCE, a(3.0, 3.0), places(0), places(1))
MARKED = replace(PAIR, good_S=bits("T."))
TERM = Term(0.1, gamma=0.5, alpha=0.0)
SIX, TO_THREE = a(1.5, 1.5, 3.0), (places(0, 0, 1), places(1, 2, 2))
ONE_1 = np.ones(1)


def ranked(*rewards):
    """Three ranked responses: three pairs of weight 1/3; the best is chosen in two of them."""
    return ResponseSums(a(*rewards), a(*rewards), np.zeros(3), np.ones(3), *TO_THREE, SIX)


def logistic(x):
    return math.log1p(math.exp(-x))


PREFERENCES = {
    **{
        name: (lambda name=name, term=term: PAIR_LOSSES[name.split(",")[0]](PAIR, term), [right])
        for name, term, right in (
            ("sigmoid", TERM, 0.644397), ("sigmoid_norm", TERM, 0.676619), ("ipo", TERM, 21.777778),
            ("robust", replace(TERM, smoothing=0.1), 0.631897), ("hinge", TERM, 0.9), ("apo_zero", TERM, 0.975006),
            ("apo_down", TERM, 0.985019), ("simpo", replace(TERM, beta=2.0), 0.779949), ("cpo", TERM, 0.668460),
            ("cpo, with a likelihood", replace(TERM, alpha=2.0), 2.668460), ("orpo", TERM, 1.057496),
            ("sft", TERM, 1.0), ("plackett_luce", TERM, 0.644397),
        )
    },
    "kto": (lambda: PAIR_LOSSES["kto"](MARKED, TERM), [0.490001, 0.485005]),
    "kto with a point": (lambda: PAIR_LOSSES["kto"](MARKED, replace(TERM, point=0.3)), [0.497500, 0.477515]),
    "kto, weighted": (
        lambda: PAIR_LOSSES["kto"](MARKED, replace(TERM, weights=(2.0, 3.0))), [2 * 0.490001, 1.455013],
    ),
    "bco": (lambda: PAIR_LOSSES["bco"](MARKED, TERM), [logistic(0.04), logistic(0.06)]),
    "kto's point": (lambda: [marked.kto_point(a(*own)) for own in ([-1, 3], [-3, 1], [])], [1.0, 0.0, 0.0]),
    "bco's point": (lambda: [marked.bco_point(a(2.0, -1.0), bits("T."))], [0.5]),
    "bco's point of good ones": (lambda: [marked.bco_point(a(2.0, 4.0), bits("TT"))], [3.0]),
    "a likelihood counts once": (lambda: [PAIR_LOSSES["sft"](ranked(-2.0, -3.0, -4.0), TERM).sum() / 3], [2.0]),
    "a ranking of three": (
        lambda: np.add.reduceat(PAIR_LOSSES["plackett_luce"](ranked(2.0, 1.0, 0.0), TERM) / 3, [0, 2]),
        [1.001943, 0.644397],
    ),
    # A prompt of responses of 1 and 3 tokens, and one of a single response, after a prompt token each.
    "tails": (
        lambda: tails.tail_weights(
            bits(".T.TTT.TT"), places(0, 0, 1, 1, 1, 1, 2, 2, 2), places(4, 4, 9), a(1.0, 3.0, 2.0), alpha=0.4
        )[bits(".T.TTT.TT")],
        [1.0, 1.0, 0.4, 0.4, 1.0, 1.0],
    ),
    "beta, linear": (lambda: [schedule.beta_at(n, 5, 1.0, 3.0, cosine=False) for n in (1, 2, 5)], [1.0, 1.5, 3.0]),
    "beta, cosine": (
        lambda: [schedule.beta_at(n, 5, 1.0, 3.0, cosine=True) for n in (1, 2, 5)], [1.0, 2.0 - ROOT, 3.0],
    ),
    "equal scores": (lambda: ranking.ranking_loss(ONE_1, ONE_1, 0 * ONE_1), [LOG2]),
    "smoothed and centred": (
        lambda: ranking.ranking_loss(2 * ONE_1, ONE_1, 0.5 * ONE_1, smoothing=0.25, centring=0.1),
        [0.75 * logistic(0.5) + 0.25 * logistic(-0.5) + 0.1 * 9.0],
    ),
}  # fmt: skip
OF_REDUCTIONS = {name: (lambda name=name: REDUCTIONS[name](UNITS), right) for name, right in REDUCED.items()}
OF_REDUCTIONS["sequences that count"] = (lambda: counted_sequences(UNITS), 2)
BY_HAND = TOKENS | OF_REDUCTIONS | ADVANTAGES | CORRECTIONS | OF_POLICY | PREFERENCES


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    compute, right = BY_HAND[name]
    close = 1e-6 if name in PREFERENCES else 1e-7 if name in ADVANTAGES else 1e-12  # of digits, and of an epsilon
    assert np.asarray(compute(), dtype=float) == pytest.approx(np.asarray(right, dtype=float), rel=close, abs=close)


def test_rounding_is_that_of_torch():
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    assert rounded_to_bfloat16(values).tolist() == torch.from_numpy(values).bfloat16().double().tolist()


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
        ({"model_type": "gpt2"}, "a reference for gpt2"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary embeddings of the type yarn"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"sliding_window": 8}, "sliding windows"),
    ],
)
def test_other_models_are_named(changes, words):
    assert words in why_unknown({"model_type": "llama", **changes}) and not why_unknown({"model_type": "llama"})
