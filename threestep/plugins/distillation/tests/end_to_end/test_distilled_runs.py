"""A student distilled by the command lines: on its own rollouts, and from a file that the teacher writes first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_step
from tests.support.new_models import save_new_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]  # on a busy machine

SHARED = "--data_path embedded --dtype fp32 --report_mfu false".split()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a student and a teacher, of one tokenizer and other widths."""
    place = tmp_path_factory.mktemp("distillation")
    for name, width in (("student", 32), ("teacher", 48)):
        save_new_model(place / name, hidden_size=width)
    return place


def lines(folder: Path, name: str) -> list[float]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in found if name in line]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_student_on_its_own_rollouts(models, ranks: int):
    out = models / f"rollouts_{ranks}"
    flags = (
        f"--actor_model_name_or_path {models}/student --teacher_model_name_or_path {models}/teacher --advantage none "
        f"--kl_coef 0 --teacher_zero_stage 3 --max_prompt_seq_len 40 --max_answer_seq_len 8 --max_train_steps 8 "
        f"--per_device_generation_batch_size {8 // ranks} --actor_learning_rate 1e-2 --eval_fraction 0 "
        f"--max_train_rows 64 --output_dir {out}"
    )
    ran = run_step(3, [*SHARED, *flags.split()], ranks)
    assert ran.code == 0, ran.words
    found = lines(out, "actor/teacher_divergence")
    assert len(found) >= 2 and found[-1] < found[0]
    assert set(lines(out, "actor/policy_loss")) == {0.0}


def test_a_file_is_written_once_and_then_serves_alone(models):
    file, found = models / "teacher.jsonl", []
    data = "--max_seq_len 64 --max_train_rows 32 --max_eval_rows 4 --eval_interval 0 --learning_rate 1e-2"
    for run, teacher in (
        ("written", f"--teacher_model_name_or_path {models}/teacher --teacher_top_k 20"),
        ("read", ""),
    ):
        out = models / run
        flags = (
            f"--model_name_or_path {models}/student --distill {file} {teacher} --likelihood_coef 0 {data} "
            f"--max_train_steps 3 --output_dir {out}"
        )
        ran = run_step(1, [*SHARED, *flags.split()])
        assert ran.code == 0, ran.words
        found.append(lines(out, "train/teacher_divergence"))
        assert len(lines(out, "eval/teacher_divergence")) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-6) and found[0][-1] < found[0][0]
    assert len(file.read_text().splitlines()) == 36


def test_another_tokenizer_is_refused_before_the_models_load(models):
    save_new_model(models / "other", vocab_size=280)
    flags = (
        f"--model_name_or_path {models}/student --teacher_model_name_or_path {models}/other --max_train_steps 1 "
        f"--max_train_rows 32 --output_dir {models}/refused"
    )
    ran = run_step(1, [*SHARED, *flags.split()])
    assert ran.code != 0
    assert "differ, so the models' distributions cannot be compared token by token; use a teacher of" in ran.stderr
