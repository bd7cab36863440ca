"""Samples side by side, what was left out, settings that differ."""

from __future__ import annotations

import json

from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.figures.tables import (
    clipped,
    evaluations,
    left_out,
    metric_rows,
    sampled_rows,
    settings_rows,
)
from threestep.plugins.report.pages.samples_section import samples_section
from threestep.plugins.report.tests.conftest import write_lines


def steps_of(*folders):
    return [step for run in read_runs(folders) for step in run.steps]


def sample(step: int, index: int, reward: float, **more) -> dict:
    return {"step": step, "uid": str(index), "prompt": f"p{index}", "response": f"r{step}", "reward": reward, **more}


def test_samples_stand_side_by_side(ppo_run):
    gains = [0, 0, 0, 0, 3, -2, 0, 5, -4]
    samples = [sample(0, index, 1.0) for index in range(9)]
    samples += [sample(7, index, 1.0 + gain, ended=index != 0) for index, gain in enumerate(gains)]
    rows = sampled_rows(steps_of(ppo_run(samples=samples)))
    assert [(row.why, row.prompt) for row in rows] == [
        *(("The first", f"p{index}") for index in range(4)),
        ("Rose most", "p7"), ("Rose most", "p4"), ("Fell most", "p8"), ("Fell most", "p5"),
    ]  # fmt: skip
    assert [(answer.column, answer.text, answer.marks[0]) for answer in rows[4].answers] == [
        ("SFT", "r0", ("reward", 1.0)), ("PPO", "r7", ("reward", 6.0))
    ]  # fmt: skip
    assert [answer.ended for answer in rows[0].answers] == [True, False]


def test_of_several_runs_the_prompts_that_all_have(ppo_run):
    one = [sample(0, index, 1.0) for index in (1, 2, 3)]
    other = [sample(0, index, 2.0) for index in (3, 4)]
    rows = sampled_rows(steps_of(ppo_run("a", one), ppo_run("b", other)))
    assert [(row.prompt, [answer.column for answer in row.answers]) for row in rows] == [("p3", ["a: SFT", "b: SFT"])]
    rows = sampled_rows(steps_of(ppo_run("c", one), ppo_run("d", other[1:])))
    assert [row.prompt for row in rows] == ["p1", "p2", "p3"]  # none in common: the first run's


def test_parts_of_the_reward_and_the_checker_are_told(ppo_run):
    samples = [sample(0, 1, 1.0, check=0.5, response_tokens=4, **{"reward/model": 1.0, "reward/gsm8k": None})]
    (row,) = sampled_rows(steps_of(ppo_run(samples=samples)))
    assert row.answers[0].marks == (("reward", 1.0), ("check", 0.5), ("gsm8k", None), ("tokens", 4.0))


def test_samples_of_step_1_have_losses_and_maybe_no_response(sft_run):
    folder = sft_run()
    plain = {"uid": "a", "prompt": "p", "ground_truth": "t"}
    drawn = {**plain, "step": 3, "loss": 1.0, "response": "r", "response_tokens": 4, "ended": False}
    write_lines(folder / "samples.jsonl", [{**plain, "step": 0, "loss": 2.0}, drawn])
    steps = steps_of(folder)
    (row,) = sampled_rows(steps)
    assert (row.ground_truth, [answer.column for answer in row.answers]) == ("t", ["start model", "SFT"])
    assert [(answer.text, answer.marks) for answer in row.answers] == [
        (None, (("loss", 2.0),)), ("r", (("loss", 1.0), ("tokens", 4.0)))
    ]  # fmt: skip
    html = samples_section(steps)
    assert "(no response was drawn)" in html and '<span>loss <b class="good">1</b></span>' in html  # lower is better
    assert not any("cut by the length limit" in name for name, _ in left_out(*steps))  # short for the report alone


def test_long_texts_are_clipped():
    assert clipped("abc", 3) == "abc"
    assert clipped("abcdef", 3) == "abc … (3 more characters)"


def test_what_was_left_out(sft_run, ppo_run):
    assert left_out(*steps_of(sft_run())) == [
        ("training rows", "90 of 1,800 tokens"),
        ("training rows cut", "4"),
        ("training rows dropped", "7 too long"),
        ("held-out rows", "90 of 1,800 tokens"),
        ("held-out rows cut", "4"),
        ("held-out rows dropped", "none"),
        ("optimizer steps skipped (overflow)", "0"),
    ]
    assert left_out(*steps_of(ppo_run())) == [
        ("responses of SFT cut by the length limit", "1 of 8"),
        ("responses of PPO cut by the length limit", "1 of 8"),
    ]


def test_settings_that_differ_come_first(sft_run):
    differ, same = settings_rows(steps_of(sft_run("a", batch=8, lr=None), sft_run("b", batch=16, data=["x", "y"])))
    assert differ == [("batch", ["8", "16"]), ("data", ["–", '["x", "y"]']), ("lr", ["null", "–"])]
    assert same == [("learning_rate", ["0.1"] * 2), ("neftune_alpha", ["0.0"] * 2), ("seed", ["1"] * 2)]


def test_every_metric_is_listed(sft_run):
    rows = {name: (values, bad) for name, values, bad in metric_rows(*steps_of(sft_run(losses=(4.0, None, 5.0, 3.0))))}
    assert rows["train/loss"] == ([4.0, 3.0, 3.0, 5.0], 1)
    assert set(rows) == {
        "eval/loss", "eval/perplexity", "train/loss", "train/tokens_per_second", "train/learning_rate", "train/skipped"
    }  # fmt: skip


def test_evaluations_keep_their_best_however_many_there_are(tmp_path):
    (tmp_path / "config.yaml").write_text("program: training.step1_sft.main")
    lines = [{"step": at, "eval/loss": abs(at - 77) + 1.0, "eval/perplexity": 2.0} for at in range(100)]
    write_lines(tmp_path / "metrics.jsonl", [*lines, {"step": 5, "eval/token_accuracy": 0.5}])
    metrics, rows = evaluations(*steps_of(tmp_path))
    assert metrics == ["eval/loss", "eval/token_accuracy"]  # what the report draws
    assert (77, [1.0, None]) in rows and rows[-1] == (99, [23.0, None]) and 30 < len(rows) <= 42
    write_lines(tmp_path / "metrics.jsonl", lines[:2])
    assert evaluations(*steps_of(tmp_path)) == ([], [])


def test_the_account_of_prompts_that_were_drawn_ahead(ppo_run):
    folder = ppo_run()
    line = {"step": 1, "version": 0, "first": 0, "prompts": 3, "rows": [2, 0], "left_out": {"cut": [0]}}
    (folder / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    ((step,),) = (run.steps for run in read_runs([folder]))
    said = dict(left_out(step))["prompts"]
    assert said == (
        "epoch 1: 1 of 3 prompts were learned from once; 1 were not: cut; 1 were not drawn: the run ended before"
    )
    assert not step.problems
    (folder / "rollouts.jsonl").write_text((json.dumps(line) + "\n") * 2)
    ((step,),) = (run.steps for run in read_runs([folder]))
    assert any("TWICE: 2 (rows 0, 2)" in problem for problem in step.problems)
