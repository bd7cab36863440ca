"""`threestep.plugins.evaluation.best_of` on two ranks keeps what one rank keeps, also where it was killed and goes on
with another number of ranks."""

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
WORDS = ("fig", "pear", "apple", "plum", "quince", "lemon", "cherry", "date", "lime", "kiwi", "grape", "melon")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_tokenizer):
    path = tmp_path_factory.mktemp("shared")
    for seed, (name, make) in enumerate((("one", tiny_causal_lm), ("rm", tiny_scalar_model))):
        save_pair(path / name, tiny_tokenizer, make, seed=seed)
    rows = [{"prompt": f"Human: {word}? Assistant:"} for word in WORDS]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "rule.py").write_text(
        "import os, time\n"
        "def slow(prompts, responses, **columns):\n"
        "    time.sleep(float(os.environ.get('SLOW', '0')))\n"
        "    return [float(len(r)) for r in responses]\n"
    )
    return path


def words(name: str) -> list[str]:
    line = "-m threestep.plugins.evaluation.best_of --model_name_or_path one --reward_model rm "
    line += "--reward model,rule.py:slow:0.01 --checker length --reward_length_characters 9 "
    line += "--data_path jsonl:rows.jsonl --eval_fraction 0 "
    line += "--data_output_path cache --max_prompt_seq_len 64 --max_new_tokens 6 --keep_cut true "
    return [*line.split(), "--per_device_eval_batch_size", "2", "--output_dir", name]


def kept(place, name: str, ranks: int):
    """The files of a run, and what was printed."""
    ran = run_python(words(name), {**os.environ, **ENVIRONMENT}, ranks, place)
    assert ran.returncode == 0, ran.stderr
    found = {path.name: path.read_bytes() for path in (place / name).iterdir()}
    return found, ran.stdout.replace(name, "NAME")


def test_rows_are_those_of_one_rank_and_of_a_run_that_was_killed(place):
    whole = kept(place, "one_rank", 1)
    assert len(whole[0]["rows.jsonl"].splitlines()) == len(WORDS)
    assert kept(place, "two_ranks", 2) == whole
    # Killed while the second or a later batch is scored; the rest by two ranks.
    batches = place / "killed" / "batches"
    root = str(Path(__file__).parents[5])
    environment = {**os.environ, **ENVIRONMENT, "SLOW": "1.5", "PYTHONPATH": root}
    command, quiet = [sys.executable, *words("killed")], subprocess.DEVNULL
    program = subprocess.Popen(command, cwd=place, env=environment, stdout=quiet, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while not (batches.exists() and list(batches.glob("0*.jsonl"))):
        assert program.poll() is None and time.monotonic() < deadline, program.stderr and program.stderr.read()
        time.sleep(0.05)
    program.send_signal(signal.SIGKILL)
    program.wait()
    assert 1 <= len(list(batches.glob("0*.jsonl"))) < 6
    assert kept(place, "killed", 2) == whole
