"""Functions of users: what TRL's are handed by name, and columns that a rule names and the rows lack."""

from __future__ import annotations

import re

import numpy as np
import pytest

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.calling import RuleBatch, call_rule
from training.utils.rewards.functions import (
    CompletionsRule,
    check_columns,
    checked_rule,
    needed_columns,
    takes_completions,
)
from training.utils.rewards.rules import gsm8k_reward
from training.utils.rewards.table import RULES
from training.utils.rewards.weighted import rule_named


def by_place(prompts, responses, answer, level=1, *, ground_truth, **columns): ...


def of_trl(completions, solution, prompts, trainer_state=None, **others): ...


class Judge:
    def __call__(self, prompts, responses, *, topic, **columns): ...


def row(reference=None) -> PromptRow:
    return PromptRow(0, np.zeros(1, np.int32), "p", reference, {})


def test_what_a_rule_cannot_be_called_without():
    assert needed_columns(by_place) == {"answer", "ground_truth"}
    assert needed_columns(CompletionsRule(of_trl)) == {"solution"}
    assert needed_columns(Judge()) == {"topic"} and needed_columns(gsm8k_reward) == {"ground_truth"}
    assert needed_columns(lambda prompts, responses, **columns: []) == needed_columns(max) == set()


def test_columns_that_there_are():
    rules = {"by_place": by_place, "of_trl": CompletionsRule(of_trl)}
    check_columns(rules, ["answer", "data_source", "solution"], ([row()], [row(), row("7")]))
    check_columns({"seen": lambda prompts, responses, data_source, drawn_turns, **columns: []}, [], ([row()],))


@pytest.mark.parametrize(
    ("rule", "columns", "sentence"),
    [
        (
            by_place,
            ["answers", "data_source"],
            "^reward function 'mine' expects the column answer, but the columns passed to rewards are 'answers'; did "
            "you mean 'answers'.; columns read as the prompt or the response are not passed, and the reference is "
            "passed as ground_truth$",
        ),
        (Judge(), ["data_source"], "expects the column topic, but the columns passed to rewards are none; columns"),
        (
            CompletionsRule(lambda completions, ground_truth, **others: []),
            ["data_source", "solution"],
            "^reward function 'mine' expects ground_truth, but no row has one; the columns passed to rewards are "
            "'solution': use one of these, or name the reference column, such as --reference_column answer; a f",
        ),
    ],
)
def test_columns_that_the_rows_lack(rule, columns, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        check_columns({"mine": rule}, columns, ([row()], [row()]))


def test_rows_whose_columns_are_all_read_by_the_format():
    with pytest.raises(
        ThreestepError, match="no row has one; the columns passed to rewards are none: name the .* --reference_column"
    ):
        check_columns({"gsm8k": gsm8k_reward}, ["data_source"], ([row()],))


@pytest.mark.parametrize("rule", [by_place, gsm8k_reward])
def test_no_row_has_the_truth_that_a_function_takes(rule):
    with pytest.raises(ThreestepError, match="^reward function 'mine' expects ground_truth, but no row has one"):
        check_columns({"mine": rule}, ["answer"], ([row()],))
    check_columns({"mine": lambda prompts, responses, ground_truth=None, **columns: []}, [], ([row()],))


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (
            lambda prompts, responses: [],
            "cannot be called with .prompts.*: got an .* 'ground_truth'; begin it with `def mine.prom",
        ),
        (lambda prompts, responses, ground_truth, data_source: [], "cannot be called .*'level'; begin"),
        (lambda responses, ground_truth, **columns: [], "cannot .*: multiple values for .*; begin it with"),
        (lambda *, prompts, responses, **columns: [], "cannot be called with .*: too many positional arguments; begin"),
        pytest.param(
            of_verl,
            "expects the argument solution_str, which only verl passes, for one .* `def reward.*map.mine, ",
            marks=pytest.mark.needs_plugin("names"),
        ),
    ],
)
def test_functions_that_cannot_be_called(rule, sentence):
    with pytest.raises(ThreestepError, match=f"^reward function 'mine' {sentence}"):
        check_columns({"mine": rule}, ["level"], ([row("7")],))


@pytest.mark.needs_plugin("names")
def test_the_function_that_calls_one_of_verl_runs(tmp_path):
    one = (
        "def one(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str == ground_truth)"
    )
    file = tmp_path / "mine.py"
    file.write_text(one)
    with pytest.raises(ThreestepError) as refusal:
        rule_named(f"{file}:one", ScoringArguments(), "--reward")
    [wrapper] = re.findall("`(.*)`", str(refusal.value))
    file = tmp_path / "wrapped.py"
    file.write_text(f"{one}\n\n\n{wrapper}")
    rule = rule_named(f"{file}:reward", ScoringArguments(), "--reward")
    batch = RuleBatch(["u", "v"], ["p", "p"], ["4", "5"], {"ground_truth": ["4", "4"], "data_source": ["d", "d"]})
    assert call_rule("own", rule, batch)[0] == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["gsm8k", "exact_match", "math"])
def test_references_that_a_named_rule_cannot_read(kind, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # math-verify may not be here
    rule = RULES[kind](ScoringArguments())
    check_columns({kind: rule}, [], ([row("7"), row(7.0)], [row("so\n#### 7")]))
    assert not capsys.readouterr().out
    check_columns({kind: rule}, [], ([row("7"), row({"a": 1})], [row()]))
    assert f"warning: reward function '{kind}' finds no " in (said := capsys.readouterr().out)
    assert "in the reference of 2 of 3 rows, the first in row 0: {'a': 1}; their responses get no" in said
    with pytest.raises(ThreestepError, match="in the reference of 2 of 2 rows, .*; name the reference column with --r"):
        check_columns({kind: rule}, [], ([row({"a": 1}), row()],))


def test_texts_without_a_number_are_no_references_of_gsm8k():
    with pytest.raises(ThreestepError, match="'gsm8k' finds no number in the reference of 1 of 1 rows, .* row 0: 'x'"):
        check_columns({"gsm8k": gsm8k_reward}, [], ([row("x")],))


ASKED = [{"role": "user", "content": "2 + 2"}]


def ours(prompts, responses, **columns): ...


def theirs(completions, **kwargs): ...


def both(prompts, completions, responses=None): ...


class Scorer:
    def __call__(self, prompts, completions, **kwargs): ...


def test_which_functions_are_theirs():
    assert [takes_completions(one) for one in (ours, theirs, both, Scorer(), len, max)] == [
        False, True, False, True, False, False,
    ]  # fmt: skip


def called(function, columns, prompts=("2 + 2", "3 + 3")):
    batch = RuleBatch(["u0", "u1"], list(prompts), ["4", "7"], columns)
    return call_rule("own", CompletionsRule(function), batch)[0]


def test_texts_and_columns_by_name():
    """As the examples of TRL's documentation are written."""
    seen = {}

    def reward_func(completions, ground_truth, **kwargs):
        seen.update(kwargs, completions=completions)
        return [1.0 if one == truth else 0.0 for one, truth in zip(completions, ground_truth, strict=True)]

    assert called(reward_func, {"ground_truth": ["4", "6"], "level": [1, 2]}) == [1.0, 0.0]
    assert seen == {"completions": ["4", "7"], "level": [1, 2], "prompts": ["2 + 2", "3 + 3"]}


def test_conversations_are_lists_of_messages():
    seen = []

    def reward_func(prompts, completions):
        seen.append((prompts, completions))
        return [float(len(completion[0]["content"])) for completion in completions]

    columns = {"prompt_messages": [ASKED, ASKED], "ground_truth": [None, None]}
    assert called(reward_func, columns, ("<|user|>2 + 2", "")) == [1.0, 1.0]
    assert seen == [
        ([ASKED, ASKED], [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "7"}]])
    ]


@pytest.mark.needs_plugin("names")
@pytest.mark.parametrize("argument", ["completion_ids", "trainer_state", "log_extra", "log_metric", "prompt_ids"])
def test_arguments_that_only_trl_has(argument):
    made = {}
    exec(f"def own(completions, {argument}): ...\ndef free(completions, {argument}=None): return [1, 2]", made)  # noqa: S102
    with pytest.raises(ThreestepError, match=f"^reward function 'own' expects the argument {argument}, which only TRL"):
        checked_rule("own", CompletionsRule(made["own"]))
    assert called(made["free"], {}) == [1.0, 2.0]
