"""The flags of the evaluation program."""

from __future__ import annotations

import pytest

from threestep.plugins.evaluation.reward_evaluation.__main__ import RewardEvaluationArguments, main
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes


def sentences(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(RewardEvaluationArguments(**{"model_name_or_path": "m", **given}), mistakes)
    return mistakes.sentences


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model_name_or_path": ""}, "--model_name_or_path expects a model folder or hub name, got nothing"),
        ({"split": "test"}, "--split expects one of eval, train, got 'test'"),
        ({"score_file": "no_such.jsonl"}, "--score_file: there is no file 'no_such.jsonl'"),
        ({"output": "scores.jsonl"}, "--output is for the scores of --score_file, and none is given; an evaluation is"),
        ({"dtype": "fp8"}, "--dtype expects one of fp32, bf16, fp16, got 'fp8'"),
        ({"zero_stage": 5}, "--zero_stage expects a number from 0 to 3, got 5"),
        ({"per_device_eval_batch_size": 0}, "--per_device_eval_batch_size expects 1 or more, got 0"),
        ({"max_tokens_per_micro_batch": 0}, "--max_tokens_per_micro_batch expects 1 or more, got 0"),
    ],
)
def test_a_flag_that_cannot_be(given, words):
    (sentence,) = sentences(**given)
    assert sentence.startswith(words)


def test_a_place_that_takes_no_scores_is_refused_before_they_are_made(tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("{}\n")
    with pytest.raises(ThreestepError, match="^--output expects a file, got '.*', which is a folder; name another$"):
        main(["--model_name_or_path", "m", "--score_file", str(pairs), "--output", str(tmp_path)])
    (tmp_path / "evaluation.json").mkdir()
    with pytest.raises(ThreestepError, match="^--output_dir expects a file, got '.*evaluation.json', which is a fold"):
        main(["--model_name_or_path", "m", "--data_path", "embedded", "--output_dir", str(tmp_path)])
