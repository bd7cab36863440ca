"""Python calls from a program that keeps a `training.py` of its own: their process afterwards, callbacks, early
stopping, held-out rows in memory, TRL's reward functions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_step, save_start
from tests.support.forked_programs import ON_CPU

PROGRAM = Path(__file__).with_name("forms_program.py")


def run_python(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own: a fork of one that has imported `training` could not import the user's."""
    environment = {**os.environ, **ON_CPU}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    place = tmp_path_factory.mktemp("forms")
    save_start(place / "start")
    shutil.copy(PROGRAM, place / "program.py")
    (place / "training.py").write_text('MINE = "the user\'s"\n')
    ran = run_python([str(place / "program.py"), str(place)], place)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return place, json.loads((place / "told.json").read_text())


def test_a_call_leaves_the_process_as_it_was_also_one_that_fails(called):
    assert called[1]["changed"] == []
    assert called[1]["mistake"].startswith("callback: main.<locals>.<lambda> raised ZeroDivisionError: ")
    assert called[1]["changed_by_a_mistake"] == []


def test_rows_in_memory_are_all_trained_on_beside_those_held_out(called):
    assert (called[1]["training_rows"], called[1]["held_out"]) == (24, 3)


def test_a_callback_sees_each_step_logs_and_stops(called):
    place, told = called
    assert [step for step, _ in told["seen"]] == told["steps"] == [0, 1, 1, 2, 2, 3, 3]
    assert all("train/loss" in names for _, names in told["seen"][1::2])
    assert all("eval/loss" in names for _, names in told["seen"][::2])
    assert told["own"] == [0, 1, 1, 2, 2, None, None]
    assert Path(told["folder"]) == place / "runs" / "followed"
    assert (place / "runs" / "followed" / "model" / "model.safetensors").is_file()


def test_a_result_shows_figures_and_a_chart(called):
    html = called[1]["html"]
    assert 'src="data:image/png;base64,iVBOR' in html and "<td>eval_loss_after</td>" in html


def test_a_resumed_run_stops_early_where_the_unbroken_one_does(called):
    """With the same weights, those of the best evaluation."""
    place, told = called
    loss, steps = told["unbroken"]
    assert told["broken"] == [loss, steps] and steps[-1] < 24
    for later in sorted((place / "broken" / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(later)
    ran = run_step(1, ["--config", place / "broken" / "config.yaml", "--resume"])
    assert ran.code == 0, ran.words
    assert "training ends after step" in ran.stdout and "in 2 evaluations (--early_stopping 2)" in ran.stdout
    unbroken, broken = (place / name / "model" / "model.safetensors" for name in ("unbroken", "broken"))
    assert unbroken.read_bytes() == broken.read_bytes()
    figures = json.loads((place / "broken" / "summary.json").read_text())
    assert figures["eval_loss_after"] == loss


def test_a_reward_of_trl_gets_messages_and_columns(called):
    prompts, completions, level, others = called[1]["rewards"]
    assert prompts[0]["role"] == "user" and prompts[0]["content"].endswith(" + 1")
    (message,) = completions
    assert message["role"] == "assistant" and isinstance(message["content"], str)
    assert level == 7 and others == ["data_source", "ground_truth"]


def test_the_users_training_is_theirs(called):
    place, told = called
    assert told["theirs"] == ["the user's", str(place / "training.py")] and told["ours"] == []


@pytest.mark.parametrize("theirs", ["training/__init__.py", pytest.param("training/loop.py", marks=pytest.mark.long)])
def test_ranks_keep_apart_too(theirs, tmp_path, called):
    """The user's `training` is found by a reward function on two ranks, and by the program itself."""
    place, _ = called
    file = tmp_path / theirs
    file.parent.mkdir(exist_ok=True)
    file.write_text('MINE = "theirs"\n')
    if file.parent != tmp_path:
        (file.parent / "utils.py").write_text("raise SystemExit('not yours')\n")
    module = "training" if theirs != "training/loop.py" else "training.loop"
    (tmp_path / "own.py").write_text(
        f"def own(prompts, responses, **columns):\n    import {module} as theirs\n"
        "    print('mine is', theirs.MINE, flush=True)\n    return [float(len(each)) for each in responses]\n"
    )
    (tmp_path / "program.py").write_text(
        "import sys, threestep\nfrom own import own\n"
        "rows = [{'prompt': f'{a} + 1 ='} for a in range(12)]\n"
        f"threestep.ppo({str(place / 'start')!r}, rows, reward=own, advantage='grpo', num_samples_per_prompt=2,\n"
        "    per_device_generation_batch_size=2, per_device_training_batch_size=2, max_answer_seq_len=4,\n"
        "    max_prompt_seq_len=32, max_train_steps=1, report=False, report_mfu=False, num_ranks=2,\n"
        f"    data_output_path={str(tmp_path / 'cache')!r})\n"
        f"import {module} as theirs\nprint('at last', theirs.MINE)\n"
    )
    ran = run_python([str(tmp_path / "program.py")], tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "mine is theirs" in ran.stdout and "at last theirs" in ran.stdout
    assert (tmp_path / "runs" / "ppo" / "model" / "model.safetensors").is_file()
