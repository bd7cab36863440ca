"""Rounds as settings of programs: which model each starts from, what it reads, what is left at the end."""

from __future__ import annotations

from pathlib import Path

from threestep.plugins.evaluation.best_of.rounds import TrainingRounds, judged_by
from training.utils.flags.step import known_steps

COMMON = {
    "data_path": ["gsm8k"], "dataset_module": "a.py", "prompt_column": "question", "data_format": "question_answer",
    "max_seq_len": 64, "zero_stage": 1, "seed": 7,
}  # fmt: skip
DRAWING = {"reward": "gsm8k:2,model", "checker": "a.py:exact", "num_samples_per_prompt": 4, "temperature": 0.7}


def rounds(**given) -> TrainingRounds:
    step = known_steps()["step2_dpo"]
    return TrainingRounds(2, Path("runs/x"), "sft/model", COMMON, {**DRAWING, **given}, {"beta": 0.2}, step)


def test_each_round_starts_from_the_model_of_the_last():
    stages = rounds().stages()
    assert [(stage.name, stage.settings["model_name_or_path"]) for stage in stages] == [
        ("evaluation", "sft/model"),
        ("best_of", "sft/model"),
        ("step2_dpo", "sft/model"),
        ("evaluation", "runs/x/rounds/1/step2_dpo/model"),
        ("best_of", "runs/x/rounds/1/step2_dpo/model"),
        ("step2_dpo", "runs/x/rounds/1/step2_dpo/model"),
        ("evaluation", "runs/x/rounds/2/step2_dpo/model"),
    ]
    assert [stage.settings["output_dir"] for stage in stages] == [str(stage.folder) for stage in stages]


def test_each_program_gets_the_settings_that_it_knows():
    judging, drawing, training, *_ = rounds().stages()
    assert drawing.settings == {
        "part": "1/2", "data_split": "2,4,4", "data_path": ["gsm8k"], "dataset_module": "a.py",
        "prompt_column": "question", "data_format": "question_answer", "max_seq_len": 64, "seed": 7, **DRAWING,
        "model_name_or_path": "sft/model", "output_dir": "runs/x/rounds/1/best_of",
    }  # fmt: skip
    # Of the prompts' files it reads nothing; the rows have a form of their own.
    assert training.settings == {
        "dataset_module": "a.py", "max_seq_len": 64, "zero_stage": 1, "seed": 7, "data_split": "0,1,0", "beta": 0.2,
        "data_path": ["jsonl:runs/x/rounds/1/best_of/rows.jsonl"], "data_format": "preference",
        "model_name_or_path": "sft/model", "output_dir": "runs/x/rounds/1/step2_dpo",
    }  # fmt: skip
    assert judging.words == ("reward",) and judging.settings["reward"] == "gsm8k:2,model,a.py:exact:0"
    assert judging.settings["split"] == "eval" and judging.settings["temperature"] == 0.7
    assert not {"part", "num_samples_per_prompt", "checker", "zero_stage"} & judging.settings.keys()
    assert rounds(part="1/1").stages()[1].settings["part"] == "1/1"
    assert rounds(misspelt=1).stages()[1].settings["misspelt"] == 1  # which the program refuses


def test_the_checker_is_judged_once():
    assert judged_by({"reward": "embedded", "checker": "embedded"}) == "embedded"
    assert judged_by({"reward": "b.py:good:0.5", "checker": "a.py:good"}) == "b.py:good:0.5"
    assert judged_by({"checker": "embedded"}) == "model,embedded:0"
    assert judged_by({"reward": "length"}) == "length"
