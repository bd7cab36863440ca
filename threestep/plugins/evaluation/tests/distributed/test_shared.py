"""Evaluations and best of n on two ranks find what one rank finds, in its order; also where a run was killed, and goes
on with another number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forked_programs import run_python
from tests.support.saved_models import save_pair
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]  # on a busy machine
WORDS = ("fig", "pear", "apple", "plum", "quince", "lemon", "cherry", "date", "lime", "kiwi")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
RULE = """import os, time
def slow(prompts, responses, **columns):
    time.sleep(float(os.environ.get('SLOW', '0')))
    return [float(len(r)) for r in responses]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_tokenizer):
    path = tmp_path_factory.mktemp("shared")
    for seed, (name, make) in enumerate((("one", tiny_causal_lm), ("two", tiny_causal_lm), ("rm", tiny_scalar_model))):
        save_pair(path / name, tiny_tokenizer, make, seed=seed)
    rows = [{"prompt": f"Human: {word}? Assistant:", "chosen": f" {word}", "rejected": " no"} for word in WORDS]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "rule.py").write_text(RULE)
    return path


def words_of(program: str, flags: str, output: str) -> list[str]:
    line = f"-m threestep.plugins.evaluation.{program} --model_name_or_path one --data_path jsonl:rows.jsonl "
    return f"{line} --data_output_path cache --output_dir {output} {flags}".split()


def found_by(place, ranks: int, program: str, flags: str, output: str):
    """The files of a run, and what was printed."""
    ran = run_python(words_of(program, flags, output), ENVIRONMENT, ranks, place)
    assert ran.returncode == 0, ran.stderr
    return {path.name: path.read_bytes() for path in (place / output).iterdir()}, ran.stdout.replace(output, "NAME")


TASKS = {
    # Seven prompts in batches of two: four batches, of which the second rank has two.
    "win_rate": "--baseline two --reward_model rm --max_new_tokens 6 --data_split 0,0,1 --max_prompt_seq_len 64 "
    "--per_device_eval_batch_size 2 --val_samples 2",
    "perplexity": "--data_split 1,0,0 --max_seq_len 64",
}


@pytest.mark.parametrize("task", ["win_rate", pytest.param("perplexity", marks=pytest.mark.long)])
def test_answers_scores_and_losses_are_those_of_one_rank(place, task):
    flags = f"--eval_fraction 0.7 {TASKS[task]}"
    one, two = (found_by(place, ranks, f"evaluate {task}", flags, f"{task}_{ranks}") for ranks in (1, 2))
    assert one == two
    assert task == "perplexity" or len(one[0]["win_rate.jsonl"].splitlines()) == 7 * 2


BEST_OF = (
    "--reward_model rm --reward model,rule.py:slow:0.01 --checker length --reward_length_characters 9 "
    "--eval_fraction 0 --max_prompt_seq_len 64 --max_new_tokens 6 --keep_cut true --per_device_eval_batch_size 2"
)


def test_rows_are_those_of_one_rank_and_of_a_run_that_was_killed(place):
    whole = found_by(place, 1, "best_of", BEST_OF, "one_rank")
    assert len(whole[0]["rows.jsonl"].splitlines()) == len(WORDS)
    assert found_by(place, 2, "best_of", BEST_OF, "two_ranks") == whole
    # Killed while the second or a later batch is scored; the rest by two ranks.
    batches = place / "killed" / "batches"
    environment = {**ENVIRONMENT, "SLOW": "1.5", "PYTHONPATH": str(Path(__file__).parents[5])}
    command, quiet = [sys.executable, *words_of("best_of", BEST_OF, "killed")], subprocess.DEVNULL
    program = subprocess.Popen(command, cwd=place, env=environment, stdout=quiet, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while not (batches.exists() and list(batches.glob("0*.jsonl"))):
        assert program.poll() is None and time.monotonic() < deadline, program.stderr and program.stderr.read()
        time.sleep(0.05)
    program.send_signal(signal.SIGKILL)
    program.wait()
    assert 1 <= len(list(batches.glob("0*.jsonl"))) < 5
    assert found_by(place, 2, "best_of", BEST_OF, "killed") == whole
