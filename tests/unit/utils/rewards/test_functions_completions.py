"""TRL's functions of rewards get what TRL hands them, by name."""

from __future__ import annotations

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.rewards.calling import RuleBatch, call_rule
from training.utils.rewards.functions import CompletionsRule, takes_completions

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
    return call_rule("own", CompletionsRule("own", function), batch)[0]


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


@pytest.mark.parametrize("argument", ["completion_ids", "trainer_state", "log_extra", "log_metric", "prompt_ids"])
def test_arguments_that_only_trl_has(argument):
    made = {}
    exec(f"def own(completions, {argument}): ...\ndef free(completions, {argument}=None): return [1, 2]", made)  # noqa: S102
    with pytest.raises(ThreestepError, match=f"^reward function 'own' expects the argument {argument}, which only TRL"):
        CompletionsRule("own", made["own"])
    assert called(made["free"], {}) == [1.0, 2.0]


def test_a_column_that_is_not_there():
    with pytest.raises(
        ThreestepError, match="^reward function 'own' expects the columns answer, and the rows have level;"
    ):
        called(lambda completions, answer: [], {"level": [1, 2]})
