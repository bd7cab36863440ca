"""A user's mistake ends a program with one sentence and code 2, before a model is loaded; on two ranks too. Mistakes
on one rank are those of `tests.support.mistake_table`. A finished run is replaced only if that is asked for, and stays
whole where the new run is refused.

The models of these runs have no weights: a program that went for them would say so instead.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Ran, run_step, save_start

pytestmark = pytest.mark.timeout(900)  # on a busy machine
ONE = (  # the models have 128 positions
    "--model_name_or_path {weightless} --data_path jsonl:{pairs} --per_device_train_batch_size 2 --max_seq_len 100 "
    "--max_prompt_seq_len 64"
)
THREE = (
    "--actor_model_name_or_path {weightless} --critic_model_name_or_path {reward} --data_path jsonl:{pairs} "
    "--per_device_generation_batch_size 4 --per_device_training_batch_size 2 --max_seq_len 100 --max_prompt_seq_len 64 "
    "--max_answer_seq_len 36"
)
# The step, its ranks, its flags, and the words that the sentence has to hold.
MISTAKES = {
    "several at once": (
        (2, 1, f"{ONE} --data_split 0,0,0 --zero_stage 4 --data_path enbedded"),
        ["0,0,0", "zero_stage", "enbedded", "embedded'"],
    ),
    "a malformed row": ((1, 2, f"{ONE} --data_path jsonl:{{malformed}}"), ["{malformed}", "line 3"]),
    "too few rows": ((1, 1, f"{ONE} --per_device_train_batch_size 4000"), ["4000", "--per_device_train_batch_size"]),
    "a batch that does not divide": (
        (3, 1, f"{THREE} --per_device_training_batch_size 3"),
        ["4 sequences", "minibatches of 3", "--per_device_training_batch_size"],
    ),
    "tokenizers that differ": (
        (3, 2, f"{THREE} --critic_model_name_or_path {{foreign}}"),
        ["--actor_model_name_or_path", "--critic_model_name_or_path", "differ"],
    ),
}


@pytest.fixture(scope="module")
def places(place: Path, pairs_file: Path) -> dict[str, str]:
    """What the braces in the flags and words stand for."""
    folder = place / "mistakes"
    folder.mkdir()
    rows = pairs_file.read_text().splitlines()
    (folder / "malformed.jsonl").write_text("\n".join([*rows[:2], '{"prompt": "no end', *rows[3:]]) + "\n")
    found = {"pairs": pairs_file, "malformed": folder / "malformed.jsonl"}
    for name in ("weightless", "reward", "foreign"):
        more = {"sentences": ["quite another text, in other words"]} if name == "foreign" else {}
        found[name] = save_start(folder / name, with_weights=False, **more)
    for name in ("reward", "foreign"):
        config = json.loads((found["reward"] / "config.json").read_text())
        config["architectures"] = ["LlamaForSequenceClassification"]
        (found[name] / "config.json").write_text(json.dumps(config))
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="module")
def all_ran(place: Path, places: dict[str, str]) -> dict[str, Ran]:
    """Every mistake's program, two at a time."""

    def run(name: str) -> Ran:
        (step, ranks, flags), _ = MISTAKES[name]
        runs = place / "mistakes" / "runs" / name.replace(" ", "_")
        own = [*flags.format(**places).split(), "--output_dir", runs, "--data_output_path", runs / "cache"]
        return run_step(step, own, ranks)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(MISTAKES, pool.map(run, MISTAKES), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_one_sentence_and_code_two(all_ran, places, name: str):
    ran = all_ran[name]
    assert ran.code == 2, ran.words
    sentences = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, ran.words
    assert "Traceback" not in ran.stderr + ran.stdout and "safetensors" not in ran.stderr, ran.words
    for words in MISTAKES[name][1]:
        assert words.format(**places) in ran.stderr, ran.words
    if name != "several at once":  # which lists them, one a line
        assert ran.stderr.strip() == sentences[0], ran.words


def test_a_finished_run_is_replaced_by_the_flag_alone(place, pairs_file):
    start, out = save_start(place / "overwrite_start"), place / "overwritten"

    def sft(*more: str) -> Ran:
        flags = f"--model_name_or_path {start} --data_path jsonl:{pairs_file} --max_seq_len 100 --max_train_steps 1 "
        flags += f"--per_device_train_batch_size 2 --data_split 1,0,0 --data_output_path {place / 'overwrite_cache'}"
        return run_step(1, [*flags.split(), "--output_dir", out, *more])

    assert (ran := sft("--save_at_end", "--learning_rate", "1e-3")).code == 0, ran.words
    weights, steps = (out / "model" / "model.safetensors").read_bytes(), out / "checkpoints" / "step_000001"
    assert steps.is_dir()
    for more in ((), ("--overwrite", "--prompt_column", "questoin")):
        ran = sft(*more)
        assert ran.code == 2, ran.words
        assert ("no column 'questoin'" if more else "to replace that run") in ran.stderr, ran.words
        assert (out / "model" / "model.safetensors").read_bytes() == weights and steps.is_dir()
        assert "seconds" in json.loads((out / "summary.json").read_text())
    assert (ran := sft("--overwrite", "--learning_rate", "1e-2")).code == 0, ran.words
    assert (out / "model" / "model.safetensors").read_bytes() != weights and not steps.exists()
    assert len((out / "metrics.jsonl").read_text().splitlines()) > 0
    ran = sft()
    assert ran.code == 2 and f"--output_dir {out} holds a finished run (summary.json, model/config.json)" in ran.stderr
