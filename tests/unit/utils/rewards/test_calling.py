"""What a reward function is given, and what it may answer."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow
from training.utils.rewards.calling import RuleBatch, call_rule, raised, reward_columns, rule_batch


def row(reference, **columns):
    return PromptRow(0, np.zeros(1, np.int32), "p", reference, columns)


def batch(columns=None, prompts=("p", "q"), responses=("yes", "no")) -> RuleBatch:
    return RuleBatch(["u0", "u1"], list(prompts), list(responses), columns or {})


def test_a_batch_is_made_of_the_rows():
    rows = [row("1", data_source="a", level=3), row(None, data_source="b", info={"index": 2})]
    made = rule_batch(rows, ["a", "b"], ["seen"])
    assert (made.uids, made.prompts, made.responses) == ([each.uid for each in rows], ["p", "p"], ["a", "b"])
    assert made.columns == {
        "ground_truth": ["1", None],
        "data_source": ["a", "b"],
        "level": [3, None],
        "info": [None, {"index": 2}],
        "seen": [None, None],  # the columns do not depend on the batch
    }
    assert made.only(1) == rule_batch(rows[1:], ["b"], ["seen", "level"]) and len(made) == 2
    assert reward_columns([row("1")]) == {"ground_truth": ["1"], "data_source": [None]}


def test_a_rule_may_change_what_it_is_given():
    """Its columns are of it and of one response alone, also where responses answer one prompt."""
    asked, seen = row(["7"], notes={"tries": []}), []

    def changes(prompts, responses, ground_truth, notes, **columns):
        for place, response in enumerate(responses):
            notes[place]["tries"].append(response)
            ground_truth[place][0] += response
        seen.append([list(notes), list(ground_truth)])
        prompts.clear(), responses.clear(), notes.clear()
        return [0.0, 1.0]

    made = rule_batch([asked, asked], ["a", "b"])
    for _ in range(2):
        assert call_rule("own", changes, made) == ([0.0, 1.0], {})
    assert seen == [[[{"tries": ["a"]}, {"tries": ["b"]}], [["7a"], ["7b"]]]] * 2
    assert (asked.reference, asked.columns) == (["7"], {"notes": {"tries": []}})


def test_scores_alone_or_with_values_to_log():
    def lengths(prompts, responses, *, bonus, **columns):
        scores = [len(response) + more for response, more in zip(responses, bonus, strict=True)]
        return (scores, {"bonus": bonus}) if prompts[0] else np.array(scores)

    columns = {"bonus": [1, 0.5], "ground_truth": [None, None]}
    told = call_rule("lengths", lengths, batch(columns, responses=("ab", "")))
    assert told == ([3.0, 0.5], {"bonus": [1.0, 0.5]})
    told = call_rule("lengths", lengths, batch(columns, prompts=("", ""), responses=("ab", "")))
    assert told == ([3.0, 0.5], {})


NAN = pytest.approx(math.nan, nan_ok=True)


@pytest.mark.parametrize(
    ("answer", "scores", "values"),
    [
        ((1.0, 0.5), [1.0, 0.5], {}),
        ([np.float32(1), torch.tensor(2)], [1.0, 2.0], {}),
        (torch.tensor([1.0, 0.5], requires_grad=True), [1.0, 0.5], {}),
        (np.array([1.0, 0.5]), [1.0, 0.5], {}),
        ([np.bool_(True), 2], [1.0, 2.0], {}),
        ((0.5, None), [0.5, NAN], {}),
        (((1.0, 0.5), {}), [1.0, 0.5], {}),
        (([1.0, 0.5], {"n": [1, True]}), [1.0, 0.5], {"n": [1.0, 1.0]}),
        # verl's
        ([{"score": 1.0}, {"score": 0.5, "why": "half"}], [1.0, 0.5], {}),
        (({"score": True, "acc": True, "pred": "4"}, {"score": 0.0, "acc": False}), [1.0, 0.0], {"acc": [1.0, 0.0]}),
    ],
)
def test_scores_of_two_responses_in_any_sequence(answer, scores, values):
    assert call_rule("own", lambda *_, **__: answer, batch()) == (scores, values)


def test_a_checker_applies_to_every_response():
    with pytest.raises(ThreestepError, match="^reward function '--checker': expected a number .* got None for uid u0"):
        call_rule("--checker", lambda *_, **__: [None, 2.0], batch(), is_complete=True)


FINITE = "a number that is finite in float32"
SAMPLE = "uid u1, prompt 'q', response 'no'"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1.0], ": expected 2 numbers, one per response, got 1"),
        (None, ": expected a list of 2 numbers, got NoneType"),
        ({"score": 1}, ": expected a list of 2 numbers, got dict"),
        (np.float32(1), ": expected a list of 2 numbers, got float32"),
        (torch.tensor(1.0), ": expected a list of 2 numbers, got Tensor"),
        ([1.0, math.nan], f": expected {FINITE}, got nan for {SAMPLE}"),
        ([1.0, -1e39], f": expected {FINITE}, got -1e+39 for {SAMPLE}"),
        ([1.0, 10**400], f": expected {FINITE}, got 1{'0' * 59} for {SAMPLE}"),
        ([True, "1"], f": expected {FINITE}, got '1' for {SAMPLE}"),
        ([1.0, torch.ones(1)], f": expected {FINITE}, got tensor([1.]) for {SAMPLE}"),
        (([1, 2], {"n": [1, 1e39]}), f", value 'n': expected {FINITE}, got 1e+39 for {SAMPLE}"),
        (([1, 2], {"n": [1, None]}), f", value 'n': expected {FINITE}, got None for {SAMPLE}"),
        (([1, 2], {"n": [1]}), ", value 'n': expected 2 numbers, one per response, got 1"),
    ],
)
def test_other_answers(answer, said):
    with pytest.raises(ThreestepError) as caught:
        call_rule("answers", lambda *_, **__: answer, batch())
    assert str(caught.value) == f"reward function 'answers'{said}"


def fails_on_no(prompts, responses, **columns):
    return [{"yes": 1.0}[response] for response in responses]


def fails_on_two(prompts, responses, **columns):
    if len(responses) > 1:
        raise RuntimeError("too many")
    return [1.0]


@pytest.mark.parametrize(
    ("rule", "what", "where"),
    [
        (fails_on_no, "KeyError: 'no'", SAMPLE),
        (fails_on_two, "RuntimeError: too many", "a batch of 2 samples, the first with uid u0, prompt 'p', response"),
    ],
)
def test_the_sample_for_which_a_rule_raises_is_looked_for(rule, what, where):
    with pytest.raises((KeyError, RuntimeError)) as caught:
        call_rule("own", rule, batch())
    said = str(raised("own", rule, batch(), caught.value))
    line = caught.traceback[-1].lineno + 1
    assert said.startswith(f"reward function 'own' raised {what} ({__file__}, line {line}) for {where}")


def test_long_texts_are_cut_in_errors():
    said = batch(prompts=("p", "q" * 200), responses=("yes", "n" * 200)).sample(1)
    assert said == f"uid u1, prompt '{'q' * 80}', response '{'n' * 80}'"


def test_an_async_rule_is_awaited_and_its_sample_named():
    async def slow(text: str) -> float:
        await asyncio.sleep(0)
        return {"yes": 3.0, "no": 2.0}[text]

    async def rule(prompts, responses, **columns):
        return await asyncio.gather(*map(slow, responses)), {"half": [0.5] * len(responses)}

    assert call_rule("rule", rule, batch()) == ([3.0, 2.0], {"half": [0.5, 0.5]})
    assert call_rule("rule", lambda *texts, **columns: rule(*texts), batch())[0] == [3.0, 2.0]
    other = batch(responses=("yes", "maybe"))
    with pytest.raises(KeyError) as caught:
        call_rule("rule", rule, other)
    sentence = str(raised("rule", rule, other, caught.value))
    assert sentence.startswith("reward function 'rule' raised KeyError: 'maybe'") and "uid u1, prompt 'q'" in sentence
