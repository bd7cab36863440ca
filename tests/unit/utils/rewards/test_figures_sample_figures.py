"""Samples by prompt, by source and by value; by what they vote."""

from __future__ import annotations

from training.utils.rewards.figures import by_source, each_prompt, several_of, value_names


def sample(prompt: int, response: str, source: str = "a/b", **values: float) -> dict:
    columns = {"data_source": source}
    return {"prompt_index": prompt, "response": response, "columns": columns, "reward": 0.0, "ended": True, **values}


def test_prompts_sources_and_values():
    one = sample(0, "x", **{"reward/rule": 1.0, "reward/rule/key": 2.0, "check": 0.0, "check/answer": 1.0})
    two, three = sample(1, "y", source="c/b"), sample(0, "z")
    assert each_prompt([one, two, three]) == [[one, three], [two]]
    assert value_names([two, one]) == ["reward/rule", "reward/rule/key", "check", "check/answer"]
    assert by_source([one, three]) == {}
    assert by_source([one, two]) == {"a_b": [one], "c_b": [two]}  # whole names, since their ends are equal
    assert set(by_source([one, sample(2, "", source="c d")])) == {"b", "c_d"}


def test_the_weighted_sum_votes_by_the_only_answer_that_a_reward_gives():
    """Texts differ; the rule's answers are 5, 5 and 6."""
    three = [
        sample(0, str(n), **{"reward": value, "reward/rule/answer": answer})
        for n, (value, answer) in enumerate(((1.0, 5.0), (1.0, 5.0), (0.0, 6.0)))
    ]
    assert several_of(three, "reward", 0)["majority@3"].value == 1.0
    others = [{**each, "reward/other/answer": float(n)} for n, each in enumerate(three)]
    assert several_of(others, "reward", 0)["majority@3"].value == 2 / 3  # two of them: by text, each its own
    assert several_of(three[:1], "reward", 0) == {} == several_of(three, "check", 0)
    assert several_of(three, "reward", 0)["mean@3"].value == 2 / 3
