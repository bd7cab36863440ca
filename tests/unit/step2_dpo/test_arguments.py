"""The flags of direct preference optimisation."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest

from tests.support.lora_settings import lora_settings
from training.step2_dpo.arguments import DpoArguments, check_marks, check_reference, kind_of_rows, needs_reference
from training.step2_dpo.loss import LOSSES
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes
from training.utils.plugins.objectives import PreferenceLoss


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
        "--reference adapter_off is for losses with a reference, and --loss_type planted has none; leave it out"
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rate": 0.0}, "--learning_rate expects more than 0, got 0.0"),
        ({"beta": -0.1}, "--beta expects more than 0, got -0.1"),
        (
            {"loss_type": "hing"},
            f"--loss_type expects one of {', '.join(LOSSES)}, got 'hing'; did you mean 'hinge'?",
        ),
        (
            {"reference": "adapters_off"},
            "--reference expects one of cached, adapter_off, got 'adapters_off'; did you mean 'adapter_off'?",
        ),
        ({"final_beta": 0.0}, "--final_beta expects more than 0, got 0.0"),
        (
            {"loss_type": "sigmoid:0.8,sigmoid:1"},
            "--loss_type expects each loss once, got 'sigmoid' twice in 'sigmoid:0.8,sigmoid:1'; add the weights",
        ),
        (
            {"loss_type": "sigmoid:0.8,sft:-1"},
            "--loss_type expects a weight above 0 behind 'sft:', got '-1' in 'sigmoid:0.8,sft:-1'",
        ),
        (
            {"loss_type": "orpo,simpo", "reference": "adapter_off"},
            "--reference adapter_off is for losses with a reference, and --loss_type orpo,simpo has none; leave it out",
        ),
        (
            {"loss_type": "ipo,sft", "label_smoothing": 0.1},
            "--label_smoothing 0.1 is for --loss_type sigmoid, sigmoid_norm, robust, simpo or cpo, and it is ipo, sft; "
            "leave it out",
        ),
        ({"sft_coef": -1.0}, "--sft_coef expects 0 or more, got -1.0"),
        ({"label_smoothing": 0.5}, "--label_smoothing expects 0 or more and less than 0.5, got 0.5"),
        (
            {"label_smoothing": 0.1, "loss_type": "ipo"},
            "--label_smoothing 0.1 is for --loss_type sigmoid, sigmoid_norm, robust, simpo or cpo, and it is ipo; "
            "leave it out",
        ),
        (
            {"simpo_gamma": 1.0, "loss_type": "cpo"},
            "--simpo_gamma 1.0 is for --loss_type simpo, and it is cpo; leave it out",
        ),
        ({"simpo_gamma": -1.0, "loss_type": "simpo"}, "--simpo_gamma expects 0 or more, got -1.0"),
        ({"cpo_alpha": 0.0}, "--cpo_alpha 0.0 is for --loss_type cpo, and it is sigmoid; leave it out"),
        (
            {"loss_type": "kto,sigmoid"},
            "--loss_type expects losses of one kind of rows, got 'kto' marked, 'sigmoid' ranked rows in 'kto,sigmoid'",
        ),
        (
            {"loss_type": "kto", "sft_coef": 0.1},
            "--ld_alpha and --sft_coef are of several responses to a prompt, and --loss_type kto reads one at a time; "
            "leave them out",
        ),
        (
            {"loss_type": "bco", "desirable_weight": 2.0},
            "--desirable_weight 2.0 is for --loss_type kto, and it is bco; leave it out",
        ),
        ({"ld_alpha": 1.1}, "--ld_alpha expects a number from 0 to 1, got 1.1"),
        (
            {"ld_alpha": 0.5, "loss_type": "simpo"},
            "--ld_alpha 0.5 weighs the tokens of a sum, and --loss_type simpo takes means over tokens; leave it out",
        ),
    ],
)
def test_mistakes(given, said):
    assert sentences(**given) == [said]


def flags(reference: str, **model) -> SimpleNamespace:
    return SimpleNamespace(of_step=SimpleNamespace(reference=reference), start=lora_settings("m", **model))


def marked_rows(marks: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(is_good=mark == "+") for mark in marks]


def test_marks_of_one_kind_are_refused():
    for marks, said in (("++++", "got 4 good and 0 bad ones"), ("---", "got 0 good and 3 bad ones")):
        for name in ("kto", "bco"):
            with pytest.raises(ThreestepError, match=f"--loss_type {name} expects good and bad responses, {said}; see"):
                check_marks(marked_rows(marks), DpoArguments(loss_type=name))
    check_marks([], DpoArguments(loss_type="sigmoid"))


@pytest.mark.parametrize(
    ("marks", "good_weight", "said"),
    [("++--", 1.0, ""), ("++----", 2.5, ""), ("++----", 1.0, "0.50 x"), ("+++-", 1.0, "3.00 x")],
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
