"""Figures and lines of samples, the closing sentence, and the standard error of a gain."""

from __future__ import annotations

import statistics

import pytest

from training.step3_ppo.parts.evaluation import (
    Evaluator,
    HeldOut,
    PpoEvaluation,
    PpoResult,
    closing_sentence,
    evaluation_figures,
    evaluation_line,
    sample_line,
    standard_error_of_gain,
)
from training.utils.run.run_folder import RunFolder


def sample(source: str, reward: float, **more) -> dict:
    columns = {"data_source": source}
    return {
        "prompt_index": 0,
        "response": "r",
        "reward": reward,
        "response_tokens": 4,
        "ended": True,
        "columns": columns,
        "prompt": "p",
        **more,
    }


def test_means_over_all_prompts_and_of_each_source():
    samples = [
        sample("jsonl:/data/a.jsonl", 1.0, check=0.0),
        sample("openai/gsm8k", 2.0, prompt_index=1),
        sample("openai/gsm8k", 6.0, prompt_index=2),
    ]
    assert evaluation_figures(samples, "eval", 0) == {
        "eval/reward": 3.0, "eval/response_tokens": 4.0, "eval/ended_share": 1.0, "eval/check": 0.0,
        "eval_a.jsonl/reward": 1.0, "eval_a.jsonl/response_tokens": 4.0, "eval_a.jsonl/ended_share": 1.0,
        "eval_a.jsonl/check": 0.0,
        "eval_gsm8k/reward": 4.0, "eval_gsm8k/response_tokens": 4.0, "eval_gsm8k/ended_share": 1.0,
    }  # fmt: skip
    assert all(name.startswith("eval/") for name in evaluation_figures(samples[1:], "eval", 0))  # one source


def test_sources_that_end_alike_keep_their_whole_names():
    found = evaluation_figures(
        [sample("jsonl:/a/x.jsonl", 1.0), sample("jsonl:/b/x.jsonl", 2.0, prompt_index=1)], "eval", 0
    )
    assert found["eval_jsonl__a_x.jsonl/reward"] == 1.0 and found["eval_jsonl__b_x.jsonl/reward"] == 2.0


def test_several_samples_of_a_prompt():
    """Rewards 1, 3 and 2, 2; the rule gives an answer to the first prompt's responses, by which both are one vote."""
    scores = [(0, 1.0, "a", 7.0), (0, 3.0, "b", 7.0), (1, 2.0, "c", 1.0), (1, 2.0, " c ", 2.0)]
    samples = [
        sample(
            "one", reward, prompt_index=index, response=text, **{"reward/rule": reward, "reward/rule/answer": answer}
        )
        for index, reward, text, answer in scores
    ]
    found = evaluation_figures(samples, "eval", 0)
    assert found["eval/reward"] == found["eval/reward/rule"] == 2.0
    assert (found["eval/reward_best@2"], found["eval/reward_worst@2"], found["eval/reward_std@2"]) == (2.5, 1.5, 0.5)
    assert found["eval/reward/rule_majority@2"] == 2.0  # the mean of 1 and 3, and of 2 and 2
    assert found["eval/reward_mean@2_low"] <= 2.0 <= found["eval/reward_mean@2_high"]
    # A value that a prompt's responses do not all have leaves that prompt out.
    some = [dict(each) for each in samples]
    del some[3]["reward/rule"]
    assert evaluation_figures(some, "eval", 0)["eval/reward/rule_best@2"] == 3.0


def test_an_evaluation_in_one_line():
    figures = {"eval/reward": 0.5, "eval/response_tokens": 12.25, "eval/ended_share": 0.75, "eval/check": 0.125}
    assert evaluation_line(0, figures) == (
        "evaluation before training: reward 0.500, checker 0.125, 12.2 tokens a response, 25% cut at the length limit"
    )
    del figures["eval/check"]
    assert evaluation_line(1200, {**figures, "eval/ended_share": 1.0}) == (
        "evaluation after rollout 1,200: reward 0.500, 12.2 tokens a response"
    )


def test_a_sample_in_one_line():
    line = {"step": 3, "prompt": "Human: 1 +\n 1? Assistant:", "response": " 2\n", "reward": 0.5}
    assert sample_line(line) == "after rollout 3: Human: 1 + 1? Assistant: -> 2 (reward 0.500)"
    assert sample_line(line, characters=5) == "after rollout 3: ...tant: -> 2 (reward 0.500)"
    assert sample_line({**line, "response": "abcdefgh"}, 5).endswith("-> abcde... (reward 0.500)")


def test_the_summary():
    result = PpoResult(PpoEvaluation([1.0, 2.0], [0.0, 0.0]), PpoEvaluation([2.0, 5.0], [1.0, 0.0]), seconds=7.0)
    summary = result.summary()
    assert (summary["reward_before"], summary["reward_after"]) == (1.5, 3.5)
    assert summary["reward_standard_error"] == pytest.approx(1.0)
    assert (summary["checker_before"], summary["checker_after"]) == (0.0, 0.5)
    assert (summary["held_out_prompts"], summary["seconds"]) == (2, 7.0)
    without = PpoResult(PpoEvaluation([1.0], None), PpoEvaluation([2.0], None), seconds=1.0)
    assert not any("checker" in name for name in without.summary())
    after_alone = PpoResult(None, PpoEvaluation([2.0, 4.0], [1.0, 0.0]), seconds=1.0).summary()
    assert after_alone == {"reward_after": 3.0, "checker_after": 0.5, "held_out_prompts": 2, "seconds": 1.0}


def test_without_held_out_prompts_nothing_is_evaluated(tmp_path):
    nothing = dict.fromkeys(("roles", "rollout_engine", "tokenizer", "checker", "settings", "metrics", "folder"))
    assert Evaluator(**nothing, held_out=HeldOut([], 4)).evaluate(0) is None
    summary = PpoResult(None, None, seconds=7.4).summary()
    assert summary == {"held_out_prompts": 0, "seconds": 7.4}
    folder = RunFolder(tmp_path, is_main_rank=True)
    assert closing_sentence(summary, folder, val_only=False) == (
        f"step 3: trained, without an evaluation, in 7 s; the model is in {folder.model}"
    )


def test_the_closing_sentence(tmp_path):
    folder = RunFolder(tmp_path, is_main_rank=True)
    whole = {"reward_before": 1.0, "reward_after": 2.5, "reward_standard_error": 0.25, "held_out_prompts": 9,
             "seconds": 7.4}  # fmt: skip
    assert closing_sentence(whole, folder, val_only=False) == (
        "step 3: mean reward on held-out prompts 1.000 -> 2.500 (standard error of the gain 0.250) in 7 s; the model "
        f"is in {folder.model}"
    )
    after_alone = {"reward_after": 2.5, "held_out_prompts": 9, "seconds": 7.4}
    assert closing_sentence(after_alone, folder, val_only=False).startswith(
        "step 3: mean reward on held-out prompts 2.500 in 7 s"
    )
    assert closing_sentence(after_alone, folder, val_only=True) == (
        "step 3: mean reward on 9 held-out prompts 2.500; nothing was trained"
    )


def test_the_standard_error_by_hand():
    # Gains 1, 3, 2, 2: mean 2, variance (1 + 1) / 3, over 4 prompts: sqrt(2/3 / 4).
    assert standard_error_of_gain([0, 1, 5, 2], [1, 4, 7, 4]) == pytest.approx((2 / 3 / 4) ** 0.5)


def test_prompts_are_paired():
    """Prompts that differ among themselves by far more than the gain leave its error small."""
    before = [float(index * 10) for index in range(20)]
    after = [value + 1 + 0.1 * (index % 2) for index, value in enumerate(before)]
    gains = [new - old for old, new in zip(before, after, strict=True)]
    assert standard_error_of_gain(before, after) == pytest.approx(statistics.stdev(gains) / 20**0.5)
    assert standard_error_of_gain(before, after) < 0.02


def test_one_prompt_and_equal_gains():
    assert standard_error_of_gain([1.0], [2.0]) == 0.0
    assert standard_error_of_gain([1.0, 2.0], [2.0, 3.0]) == 0.0


def test_evaluations_of_different_prompts_do_not_meet():
    with pytest.raises(ValueError):
        standard_error_of_gain([1.0, 2.0], [1.0])
