"""Direct preference optimisation: its flags; its losses by hand, against their formulas in float64, and in parts;
sums of losses; what a run watches, and says at its end."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import plain_losses
from tests.support.lora_settings import lora_settings
from tests.support.objectives import objective, objectives
from training.step2_dpo.arguments import (
    DpoArguments,
    check_marks,
    check_reference,
    kind_of_rows,
    needs_reference,
    objectives_of,
    schedule_of,
    weighted_names,
)
from training.step2_dpo.loss import (
    LOSSES,
    BetaSchedule,
    Objective,
    Responses,
    at_beta,
    log_ratios,
    pair_figures,
    preference_loss,
)
from training.step2_dpo.trainer import DpoEvaluation, _uniform, closing_figures, closing_sentence
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes
from training.utils.layout.rows import sequence_sums
from training.utils.plugins.objectives import PreferenceLoss
from training.utils.run.divergence import EQUAL_PAIRS


def sentences(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(DpoArguments(**given), mistakes)
    return mistakes.sentences


def test_the_defaults_and_each_loss_are_right():
    assert sentences() == []
    assert (
        [sentence for name in LOSSES for sentence in sentences(loss_type=name)] == sentences(label_smoothing=0.1) == []
    )


def test_the_table_names_the_flags():
    """In its order, each loss's own flags where the others stand."""
    own = list(dict.fromkeys(field.name for loss in LOSSES.values() if loss.flags for field in fields(loss.flags)))
    first = ["learning_rate", "beta", "final_beta", "beta_schedule", "loss_type"]
    rest = ["sft_coef", "ld_alpha", "reference"]
    assert [field.name for field in fields(DpoArguments)] == [*first, *own, *rest]
    [said] = [field.metadata["help"] for field in fields(DpoArguments) if field.name == "loss_type"]
    assert all(f"'{name}' {loss.note}" in said for name, loss in LOSSES.items())


def test_a_loss_without_a_reference(monkeypatch):
    monkeypatch.setitem(LOSSES, "planted", PreferenceLoss("is planted", lambda m, _: m, needs_reference=False))
    assert sentences(loss_type="planted") == [] and not needs_reference(DpoArguments(loss_type="planted"))
    assert all(needs_reference(DpoArguments(loss_type=name)) == loss.needs_reference for name, loss in LOSSES.items())
    assert sentences(loss_type="planted", reference="adapter_off") == [
        "--reference adapter_off needs a loss with a reference, but --loss_type planted uses none; remove --reference"
    ]


SMOOTHING = "--label_smoothing 0.1 applies only to --loss_type sigmoid, sigmoid_norm, robust, simpo or cpo"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rate": 0.0}, "--learning_rate expects more than 0, got 0.0"),
        ({"beta": -0.1}, "--beta expects more than 0, got -0.1"),
        ({"loss_type": "hing"}, f"--loss_type expects one of {', '.join(LOSSES)}, got 'hing'; did you mean 'hinge'?"),
        ({"reference": "adapters_off"}, "--reference expects one of cached, adapter_off, got 'adapters_off'"),
        ({"final_beta": 0.0}, "--final_beta expects more than 0, got 0.0"),
        (
            {"loss_type": "sigmoid:0.8,sigmoid:1"},
            "--loss_type expects each loss once, got 'sigmoid' twice in 'sigmoid:0",
        ),
        ({"loss_type": "sigmoid:0.8,sft:-1"}, "--loss_type expects a weight above 0 after 'sft:', got '-1' in"),
        (
            {"loss_type": "orpo,simpo", "reference": "adapter_off"},
            "--reference adapter_off needs a loss with a reference",
        ),
        ({"loss_type": "ipo,sft", "label_smoothing": 0.1}, f"{SMOOTHING}, not to ipo, sft; remove it"),
        ({"sft_coef": -1.0}, "--sft_coef expects 0 or more, got -1.0"),
        ({"label_smoothing": 0.5}, "--label_smoothing expects 0 or more and less than 0.5, got 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, f"{SMOOTHING}, not to ipo; remove it"),
        ({"simpo_gamma": 1.0, "loss_type": "cpo"}, "--simpo_gamma 1.0 applies only to --loss_type simpo, not to cpo"),
        ({"simpo_gamma": -1.0, "loss_type": "simpo"}, "--simpo_gamma expects 0 or more, got -1.0"),
        ({"cpo_alpha": 0.0}, "--cpo_alpha 0.0 applies only to --loss_type cpo, not to sigmoid; remove it"),
        ({"loss_type": "kto,sigmoid"}, "--loss_type 'kto,sigmoid' mixes kinds of rows ('kto' marked, 'sigmoid'"),
        ({"loss_type": "kto", "sft_coef": 0.1}, "--ld_alpha and --sft_coef need several responses per prompt, but"),
        (
            {"loss_type": "bco", "desirable_weight": 2.0},
            "--desirable_weight 2.0 applies only to --loss_type kto, not to bco",
        ),
        ({"ld_alpha": 1.1}, "--ld_alpha expects a number from 0 to 1, got 1.1"),
        ({"ld_alpha": 0.5, "loss_type": "simpo"}, "--ld_alpha 0.5 needs a sum over tokens, but --loss_type simpo"),
    ],
)
def test_mistakes(given, said):
    [sentence] = sentences(**given)
    assert sentence.startswith(said)


def flags(reference: str, **model) -> SimpleNamespace:
    return SimpleNamespace(of_step=SimpleNamespace(reference=reference), start=lora_settings("m", **model))


def marked_rows(marks: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(is_good=mark == "+") for mark in marks]


def test_marks_of_one_kind_are_refused():
    for marks, said in (("++++", "got 4 good and 0 bad"), ("---", "got 0 good and 3 bad")):
        for name in ("kto", "bco"):
            with pytest.raises(ThreestepError, match=f"--loss_type {name} needs good and bad responses, {said}; check"):
                check_marks(marked_rows(marks), DpoArguments(loss_type=name))
    check_marks([], DpoArguments(loss_type="sigmoid"))


@pytest.mark.parametrize(
    ("marks", "good_weight", "said"),
    [("++--", 1.0, ""), ("++----", 2.5, ""), ("++----", 1.0, "0.50 times"), ("+++-", 1.0, "3.00 times")],
)
def test_weights_that_do_not_balance_the_marks_are_said(marks, good_weight, said, capsys):
    check_marks(marked_rows(marks), DpoArguments(loss_type="kto", desirable_weight=good_weight))
    out = capsys.readouterr().out
    assert said in out and ("KTO's authors advise" in out) is bool(said)
    check_marks(marked_rows(marks), DpoArguments(loss_type="bco"))
    assert capsys.readouterr().out == ""


def test_sums_of_losses():
    assert sentences(loss_type="sigmoid:0.8, sft:.2", label_smoothing=0.1) == sentences(loss_type="ipo,orpo") == []
    assert needs_reference(DpoArguments(loss_type="orpo,sigmoid:2")) and not needs_reference(
        DpoArguments(loss_type="orpo,simpo")
    )
    assert kind_of_rows(DpoArguments(loss_type="orpo,sigmoid:2")) == "ranked"


@pytest.mark.parametrize("model", [{}, {"lora_dim": 4, "only_optimize_lora": False}])
def test_adapter_off_needs_adapters_that_train_alone(model):
    with pytest.raises(ThreestepError, match="--reference adapter_off needs --lora_dim above 0 and --only_optimize"):
        check_reference(flags("adapter_off", **model))
    check_reference(flags("cached", **model))
    check_reference(flags("adapter_off", lora_dim=4))


OF_MARGINS = [name for name, loss in LOSSES.items() if loss.of_margins]  # others are tested in files of their own
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "simpo")
pairs = st.lists(st.tuples(st.floats(-40, 40), st.floats(0, 1)), min_size=1, max_size=20)
betas = st.floats(0.05, 2.0)
drawn_objectives = st.one_of(
    st.builds(objective, st.sampled_from(OF_MARGINS), betas),
    st.builds(objective, st.sampled_from(SMOOTHED), betas, label_smoothing=st.sampled_from([0.1, 0.3])),
)


def loss_of(margins, weights, prompts, how: Objective, dtype=torch.float32):
    """The loss of pairs with these margins: the better ones' log-ratios are the margins, the worse ones' 0."""
    ratios_B = torch.tensor([*margins, *[0.0] * len(margins)], dtype=dtype, requires_grad=True)
    is_best_B = torch.arange(len(ratios_B)) < len(margins)
    better_Q = torch.arange(len(margins))
    weight_Q = torch.tensor(weights, dtype=dtype)
    pairs = (better_Q, better_Q + len(margins), weight_Q)
    columns = {"is_good": is_best_B.to(dtype)}
    responses = Responses(ratios_B, ratios_B, ratios_B, *pairs, is_best_B, columns)
    return preference_loss(responses, prompts, how), ratios_B


@pytest.mark.needs_plugin("objectives")
def test_every_loss_has_a_formula_here():
    assert {*OF_MARGINS} <= {*plain_losses.PAIR_LOSSES}


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.loss_of_equal_pairs])
def test_the_loss_of_equal_pairs(name):
    how = objective(name, 0.7)
    nats = loss_of([0.0], [1.0], 1.0, how, torch.float64)[0].item()
    assert how.loss.loss_of_equal_pairs(how) == pytest.approx(nats, rel=1e-12)


# Log-ratio margins 0 and 2 log 3, weights 1 and 1/2, two prompts in the step; beta 1/2 makes rewards of 0 and log 3.
@pytest.mark.parametrize(
    ("loss_type", "smoothing", "first", "second", "slopes"),
    [
        # -log sigmoid: of 0 log 2, of log 3 log 4/3; slope -beta sigmoid(-reward), sigmoid(-log 3) = 1/4
        ("sigmoid", 0.0, math.log(2), math.log(4 / 3), (-1 / 4, -1 / 8)),
        # a tenth of -log sigmoid(-reward): log 2, log 4; slopes -beta (0.9 / 2 - 0.1 / 2), -beta (0.9 / 4 - 0.1 x 3/4)
        ("sigmoid", 0.1, math.log(2), 0.9 * math.log(4 / 3) + 0.1 * math.log(4), (-0.2, -0.075)),
        # (margin - 1)^2, slope 2 (margin - 1)
        ("ipo", 0.0, 1.0, (2 * math.log(3) - 1) ** 2, (-2.0, 2 * (2 * math.log(3) - 1))),
        # 1 - reward, and 0 beyond 1 (log 3 = 1.0986); slopes -beta, 0
        ("hinge", 0.0, 1.0, 0.0, (-0.5, 0.0)),
    ],
)
def test_by_hand(loss_type, smoothing, first, second, slopes):
    how = objective(loss_type, 0.5, **({"label_smoothing": smoothing} if smoothing else {}))
    loss, ratios_B = loss_of([0.0, 2 * math.log(3)], [1.0, 0.5], 2.0, how)
    assert loss.item() == pytest.approx((first + 0.5 * second) / 2, rel=1e-6)
    loss.backward()
    better = [slopes[0] / 2, 0.5 * slopes[1] / 2]
    assert ratios_B.grad.tolist() == pytest.approx([*better, -better[0], -better[1]], rel=1e-5, abs=1e-7)


@pytest.mark.needs_plugin("objectives")
@settings(max_examples=80, deadline=None)
@given(pairs, drawn_objectives)
def test_against_the_formulas(pairs, how):
    margins, weights = zip(*pairs, strict=True)
    name = next(name for name, loss in LOSSES.items() if loss is how.loss)
    ratios_S = torch.tensor([[margin, 0.0] for margin in margins], dtype=torch.float64).flatten()
    zeros_S = torch.zeros_like(ratios_S)
    sums = plain_losses.Sums(ratios_S, ratios_S, zeros_S, zeros_S + 1, {"beta": how.beta, **vars(how.options)})
    expected = (torch.tensor(weights, dtype=torch.float64) * plain_losses.comparison(name, sums)).sum().item() / 7
    loss, _ = loss_of(margins, weights, 7.0, how, torch.float64)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.needs_plugin("objectives")
@settings(max_examples=30, deadline=None)
@given(pairs, drawn_objectives, st.integers(0, 20))
def test_parts_add_up_to_the_whole(pairs, how, cut):
    whole, left, right = (
        loss_of([m for m, _ in part], [w for _, w in part], 5.0, how, torch.float64)[0].item()
        for part in (pairs, pairs[:cut], pairs[cut:])
    )
    assert left + right == pytest.approx(whole, rel=1e-12, abs=1e-15)


def test_three_ranked_responses():
    # Log-ratios log 4, 0, 0 with beta 1: pairs (1, 2) and (1, 3) cost -log(4/5), (2, 3) costs log 2, a third each.
    ratios_B = torch.tensor([math.log(4), 0.0, 0.0])
    better_Q, worse_Q = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    pairs = (better_Q, worse_Q, torch.full((3,), 1 / 3))
    is_best_B = torch.tensor([True, False, False])
    loss = preference_loss(Responses(ratios_B, ratios_B, ratios_B, *pairs, is_best_B), 1.0, objective("sigmoid", 1.0))
    assert loss.item() == pytest.approx((2 * math.log(5 / 4) + math.log(2)) / 3)


def test_a_loss_of_responses_is_divided_by_the_prompts_and_sees_their_columns():
    def of_responses(responses: Responses, how: Objective) -> torch.Tensor:
        return (how.beta * responses.columns["is_good"] * responses.ratios_B).sum()

    none = torch.zeros(0, dtype=torch.int64)
    ratios_B = torch.tensor([1.0, 2.0, 4.0])
    columns = {"is_good": torch.tensor([1.0, 0, 1])}
    given = Responses(ratios_B, ratios_B, ratios_B, none, none, torch.zeros(0), none, columns)
    how = Objective(PreferenceLoss("", of_responses=of_responses), 0.5)
    assert preference_loss(given, 2.0, how).item() == 1.25


def test_the_figures_of_pairs():
    rewards_B = torch.tensor([3.0, 1.0, 2.0, 2.0])
    pairs_Q = (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]), torch.ones(3))
    found = pair_figures(rewards_B, Responses(rewards_B, rewards_B, rewards_B, *pairs_Q, torch.ones(4, dtype=bool)))
    assert found == {"pairs": 3, "right": 1, "chosen_reward": 6, "rejected_reward": 5}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_wide_margin_does_not_overflow(smoothing):
    loss, ratios_B = loss_of([-1000.0, 1000.0], [1.0, 1.0], 1.0, objective("sigmoid", 1.0, label_smoothing=smoothing))
    assert loss.item() == pytest.approx((1 - smoothing) * 1000 + smoothing * 1000)
    loss.backward()
    assert ratios_B.grad[:2].tolist() == pytest.approx([-(1 - smoothing), smoothing])


@pytest.mark.parametrize("loss_type", LOSSES)
def test_no_pairs_give_zero_on_the_graph(loss_type):
    loss, ratios_B = loss_of([], [], 5.0, objective(loss_type, 0.1))
    loss.backward()
    assert loss.item() == 0 and ratios_B.grad.numel() == 0


def test_sums_of_sequences():
    # Sequence 1 has no token here; the tokens of 0 and 2 are mixed.
    sums_B = sequence_sums(torch.tensor([1.0, 10.0, 2.0, 20.0]), torch.tensor([0, 2, 0, 2]), 3)
    assert sums_B.tolist() == [3.0, 0.0, 30.0]
    assert sequence_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 2).tolist() == [0.0, 0.0]


@pytest.mark.needs_plugin("objectives")
def test_log_ratios_are_sums_or_means():
    logprobs_B, reference_B, tokens_B = torch.tensor([-6.0, -4.0]), torch.tensor([-9.0, -2.0]), torch.tensor([3.0, 4.0])
    assert {name for name, loss in LOSSES.items() if loss.is_token_mean} == {"sigmoid_norm", "ipo", "orpo", "simpo"}
    for loss in LOSSES.values():
        expected = [3.0, -2.0] if loss.needs_reference else [-6.0, -4.0]
        if loss.is_token_mean:
            expected = [expected[0] / 3, expected[1] / 4]
        assert log_ratios(logprobs_B, reference_B, tokens_B, loss).tolist() == expected


@pytest.mark.needs_plugin("objectives")
def test_losses_and_weights():
    assert weighted_names("ipo") == {"ipo": 1.0}
    assert weighted_names("sigmoid:0.8, sft:.2,orpo:1e-1") == {"sigmoid": 0.8, "sft": 0.2, "orpo": 0.1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--loss_type expects one of .*, got ''"),
        ("sigmoid,", "--loss_type expects one of .*, got ''"),
        ("sigmoid:0.8,hing", "got 'hing'; did you mean 'hinge'"),
        ("sigmoid:0", "--loss_type expects a weight above 0 after 'sigmoid:', got '0' in 'sigmoid:0'"),
        ("sigmoid:nan", "got 'nan'"),
        ("sigmoid:", "got '' in 'sigmoid:'"),
    ],
)
def test_mistakes_of_sums(text, said):
    with pytest.raises(ThreestepError, match=said):
        weighted_names(text)


@pytest.mark.needs_plugin("objectives")
def test_the_terms():
    flags = DpoArguments(
        loss_type="sigmoid:0.8,simpo:0.2", beta=0.3, sft_coef=0.5, simpo_gamma=1.0, label_smoothing=0.1
    )
    first, second, third = objectives_of(flags)
    assert [one.name for one in (first, second, third)] == ["sigmoid", "simpo", "sft"]
    assert [one.weight for one in (first, second, third)] == [0.8, 0.2, 0.5]
    assert (first.options.label_smoothing, second.options.simpo_gamma, third.options) == (0.1, 1.0, None)
    assert [one.loss for one in (first, second)] == [LOSSES["sigmoid"], LOSSES["simpo"]]
    assert {one.beta for one in at_beta((first, second), 0.7)} == {0.7}


def test_sft_coef_adds_to_a_likelihood_that_is_in_the_sum():
    terms = objectives_of(DpoArguments(loss_type="sigmoid,sft:0.25", sft_coef=0.5))
    assert [(one.name, one.weight) for one in terms] == [("sigmoid", 1.0), ("sft", 0.75)]


def test_beta_by_the_step():
    """Of five steps: the first has --beta, the last --final_beta, also in evaluations before and after."""
    linear = schedule_of(DpoArguments(beta=0.1, final_beta=0.5))
    assert [linear.at(step, 5) for step in range(6)] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5])
    cosine = schedule_of(DpoArguments(beta=0.1, final_beta=0.5, beta_schedule="cosine"))
    quarter = 0.1 + 0.4 * (1 - math.cos(math.pi / 4)) / 2
    assert [cosine.at(step, 5) for step in (1, 2, 3, 5)] == pytest.approx([0.1, quarter, 0.3, 0.5])
    assert schedule_of(DpoArguments(beta=0.3)).at(4, 9) == 0.3
    assert BetaSchedule(0.1, 0.5).at(1, 1) == 0.1


def test_the_closing_figures():
    before, after = DpoEvaluation(0.6931, 0.0, 0.0, 0.0, 0.0), DpoEvaluation(0.51, 0.75, 1.5, 0.5, -1.0)
    assert closing_figures(before, after) == {
        "eval_loss_before": 0.6931,
        "eval_loss": 0.51,
        "eval_accuracy": 0.75,
        "eval_reward_margin": 1.5,
        "eval_chosen_reward": 0.5,
        "eval_rejected_reward": -1.0,
    }
    said = "evaluation loss 0.693 -> 0.510, pair accuracy 0.750, reward margin 1.50"
    assert closing_sentence(before, after) == said


def test_without_evaluation_rows_the_same_figures_are_none():
    full = DpoEvaluation(1.0, 1.0, 1.0, 1.0, 1.0)
    assert closing_figures(None, None) == dict.fromkeys(closing_figures(full, full))


def test_where_training_begins():
    """A sign of divergence for losses that have one, unless another term is added; where training begins, if the policy
    is its reference then."""
    assert _uniform(objectives("sigmoid", 0.1)) == EQUAL_PAIRS
    assert _uniform(objectives("sigmoid", 0.1, sft_coef=1.0)) is _uniform(objectives("ipo", 0.1)) is None
    free = PreferenceLoss("", lambda m, _: m, needs_reference=False, loss_of_equal_pairs=lambda how: how.beta)
    assert _uniform([Objective(free, 2.0)]) == replace(EQUAL_PAIRS, nats=2.0, begins_there=False)
