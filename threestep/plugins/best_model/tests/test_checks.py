"""A metric that no evaluation has is named before libraries load."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from threestep.plugins.best_model.arguments import BestModelArguments
from threestep.plugins.best_model.best import Best, is_better, metric_in
from threestep.plugins.best_model.checks import check, may_be_evaluated
from training.step1_sft.trainer import SftEvaluation
from training.step2_dpo.trainer import DpoEvaluation
from training.step3_ppo.parts.evaluation import evaluation_figures
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.arguments import defaults_of, parse_arguments
from training.utils.flags.step import Step, known_steps


def checked(step: str, metric: str) -> None:
    groups = known_steps()[step].groups
    settings = {**defaults_of(groups), "metric_for_best_model": metric}
    own = BestModelArguments(early_stopping=2, metric_for_best_model=metric)
    mistakes = Mistakes()
    check(SimpleNamespace(settings=settings, added=SimpleNamespace(of=lambda kind: own)), mistakes)
    mistakes.raise_if_any()


@pytest.mark.parametrize(
    ("step", "metric", "sentence"),
    [
        (
            "step1_sft", "eval_accurcy",
            "^--metric_for_best_model expects an evaluation metric, one of loss, perplexity, token_accuracy, got "
            "'eval_accurcy'; did you mean 'token_accuracy'.$",
        ),
        ("step2_dpo", "reward", "one of loss, accuracy, reward_margin, chosen_.*, rejected_reward, got 'reward'; did"),
        ("step3_ppo", "eval/rewrd", "one of reward, check, .*, turns, reward/NAME, check/NAME, got 'eval/rewrd'; did"),
    ],
)  # fmt: skip
def test_a_metric_that_no_evaluation_has(step, metric, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        checked(step, metric)


@pytest.mark.parametrize(
    ("step", "metrics"),
    [
        ("step1_sft", ("eval_loss", "eval/perplexity", "token_accuracy")),
        ("step2_reward", ("accuracy", "eval_accuracy_longer", "chosen_mean")),
        ("step3_ppo", ("eval_reward", "reward/mine", "reward_best@4", "eval_gsm8k/reward", "check/x")),
    ],
)
def test_metrics_that_there_may_be(step, metrics):
    for metric in metrics:
        checked(step, metric)


def test_every_figure_of_an_evaluation_is_declared():
    steps = known_steps()
    for name, evaluation in (("step1_sft", SftEvaluation), ("step2_dpo", DpoEvaluation)):
        for each in dataclasses.fields(evaluation):
            assert may_be_evaluated(f"eval/{each.name}", steps[name].figures.evaluates), each.name
    sample = {"prompt_index": 0, "sample": 0, "reward": 1.0, "response_tokens": 3, "ended": True, "turns": 2}
    samples = [
        {**sample, "columns": {"data_source": source}, "response": "a", "check": 1.0, "reward/mine/answer": 2.0}
        for source in "ab"
    ]
    for figure in evaluation_figures(samples, "eval", seed=1):
        assert may_be_evaluated(figure, steps["step3_ppo"].figures.evaluates), figure
    assert may_be_evaluated("anything", Step("step4_other", "o", "o", ()).figures.evaluates)


@pytest.mark.parametrize("flag", ["--early_stopping", "--early_stopping_patience"])
def test_patience_without_a_number_is_a_sentence(flag):
    with pytest.raises(ThreestepError) as mistake:
        parse_arguments((BestModelArguments,), [flag], "")
    assert str(mistake.value) == (
        "--early_stopping expects 0 or more (evaluations), got nothing; write a value after the flag"
    )


FIGURES = {"eval/loss": 1.0, "eval/accuracy": 0.5, "eval_greedy/reward": 2.0}


def test_names_of_a_metric_and_what_is_better():
    names = {
        None: "eval/loss",
        "loss": "eval/loss",
        "eval_accuracy": "eval/accuracy",
        "eval/accuracy": "eval/accuracy",
        "eval_greedy/reward": "eval_greedy/reward",
    }
    assert {asked: metric_in(FIGURES, asked) for asked in names} == names
    assert metric_in({**FIGURES, "eval/reward": 0.0}, None) == "eval/reward"  # step 3's default
    best = Best(1, "eval/loss", 1.0)
    assert is_better(0.5, best, False) and not is_better(1.0, best, False) and not is_better(1.0, best, True)
    assert is_better(5.0, None, False) and not is_better(float("inf"), None, True)
