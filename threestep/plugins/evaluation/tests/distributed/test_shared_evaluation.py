"""`threestep.plugins.evaluation.evaluate` on two ranks finds what one rank finds, in its order."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.forked_programs import run_python
from tests.support.saved_models import save_pair
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]  # on a busy machine
WORDS = ("fig", "pear", "apple", "plum", "quince", "lemon", "cherry", "date", "lime", "kiwi")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_tokenizer):
    path = tmp_path_factory.mktemp("shared")
    for seed, (name, make) in enumerate((("one", tiny_causal_lm), ("two", tiny_causal_lm), ("rm", tiny_scalar_model))):
        save_pair(path / name, tiny_tokenizer, make, seed=seed)
    rows = [{"prompt": f"Human: {word}? Assistant:", "chosen": f" {word}", "rejected": " no"} for word in WORDS]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluated(place, ranks: int, task: str, flags: str):
    """The files of one evaluation, and what was printed."""
    words = f"-m threestep.plugins.evaluation.evaluate {task} --model_name_or_path one --data_path jsonl:rows.jsonl "
    words += f"--data_output_path cache --eval_fraction 0.7 --output_dir {task}_{ranks} {flags}"
    ran = run_python(words.split(), {**os.environ, **ENVIRONMENT}, ranks, place)
    assert ran.returncode == 0, ran.stderr
    return {path.name: path.read_text() for path in (place / f"{task}_{ranks}").iterdir()}, ran.stdout


def test_answers_and_scores_are_those_of_one_rank(place):
    """Seven prompts in batches of two: four batches, of which the second rank has two."""
    flags = "--baseline two --reward_model rm --max_new_tokens 6 --data_split 0,0,1 --max_prompt_seq_len 64 "
    flags += "--per_device_eval_batch_size 2 --val_samples 2"
    one, two = (evaluated(place, ranks, "win_rate", flags) for ranks in (1, 2))
    assert len(one[0]["win_rate.jsonl"].splitlines()) == 7 * 2
    assert one[0] == two[0] and one[1] == two[1].replace("win_rate_2", "win_rate_1")


@pytest.mark.long
def test_losses_are_those_of_one_rank(place):
    one, two = (evaluated(place, ranks, "perplexity", "--data_split 1,0,0 --max_seq_len 64") for ranks in (1, 2))
    assert one[0] == two[0]
