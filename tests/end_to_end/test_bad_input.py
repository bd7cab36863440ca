"""A user's mistake ends a program with one sentence and code 2, before a model is loaded.

The models of these runs have no weights: a program that went for them would say so instead.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Ran, run_step, save_start
from training.step2_dpo.losses.ranked import LOSSES

pytestmark = pytest.mark.timeout(900)  # on a busy machine


@dataclass(frozen=True)
class Mistake:
    """One command line with a mistake, and the words that its sentence has to hold."""

    name: str
    step: int | str
    flags: list[str]
    words: list[str]
    ranks: int = 1


ONE = (  # the models have 128 positions
    "--model_name_or_path {weightless} --data_path jsonl:{pairs} --per_device_train_batch_size 2 --max_seq_len 100 "
    "--max_prompt_seq_len 64"
).split()
THREE = (
    "--actor_model_name_or_path {weightless} --critic_model_name_or_path {reward} --data_path jsonl:{pairs} "
    "--per_device_generation_batch_size 4 --per_device_training_batch_size 2 --max_seq_len 100 --max_prompt_seq_len 64 "
    "--max_answer_seq_len 36"
).split()

MISTAKES = [
    Mistake("unknown_flag", 1, [*ONE, "--learning_rat", "1"], ["--learning_rat", "did you mean 'learning_rate'"]),
    Mistake(
        "several_at_once",
        2,
        [*ONE, "--data_split", "0,0,0", "--zero_stage", "4", "--data_path", "enbedded"],
        ["0,0,0", "zero_stage", "enbedded", "embedded'"],
    ),
    Mistake(
        "malformed_row_two_ranks", 1, [*ONE, "--data_path", "jsonl:{malformed}"], ["{malformed}", "line 3"], ranks=2
    ),
    Mistake("empty_dataset", 1, [*ONE, "--data_path", "jsonl:{empty}"], ["{empty}", "empty"]),
    Mistake(
        "too_few_rows", 1, [*ONE, "--per_device_train_batch_size", "4000"], ["4000", "--per_device_train_batch_size"]
    ),
    Mistake("float16_on_a_cpu", 1, [*ONE, "--dtype", "fp16", "--zero_stage", "1"], ["--dtype fp16", "GPU", "bf16"]),
    Mistake("no_such_loss", "dpo", [*ONE, "--loss_type", "sigmod"], [", ".join(LOSSES), "did you mean 'sigmoid'"]),
    Mistake("adapters_to_turn_off", "dpo", [*ONE, "--reference", "adapter_off"], ["adapter_off", "--lora_dim"]),
    Mistake(
        "batch_that_does_not_divide",
        3,
        [*THREE, "--per_device_training_batch_size", "3"],
        ["4 sequences", "minibatches of 3", "--per_device_training_batch_size"],
    ),
    Mistake(
        "tokenizers_differ_two_ranks",
        3,
        [*THREE, "--critic_model_name_or_path", "{foreign}"],
        ["--actor_model_name_or_path", "--critic_model_name_or_path", "differ"],
        ranks=2,
    ),
    Mistake(
        "language_model_as_reward_model",
        3,
        [*THREE, "--critic_model_name_or_path", "{weightless}"],
        ["LlamaForCausalLM", "sequence classification", "step 2"],
    ),
]


@pytest.fixture(scope="module")
def places(place: Path, pairs_file: Path) -> dict[str, str]:
    """What the braces in the flags and words stand for."""
    import json

    folder = place / "mistakes"
    folder.mkdir()
    rows = pairs_file.read_text().splitlines()
    (folder / "malformed.jsonl").write_text("\n".join([*rows[:2], '{"prompt": "no end', *rows[3:]]) + "\n")
    (folder / "empty.jsonl").write_text("")
    reward = save_start(folder / "reward", with_weights=False)
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    foreign = save_start(folder / "foreign", with_weights=False, sentences=["quite another text, in other words"])
    (foreign / "config.json").write_text((reward / "config.json").read_text())
    return {
        "pairs": str(pairs_file),
        "malformed": str(folder / "malformed.jsonl"),
        "empty": str(folder / "empty.jsonl"),
        "weightless": str(save_start(folder / "weightless", with_weights=False)),
        "reward": str(reward),
        "foreign": str(foreign),
    }


@pytest.fixture(scope="module")
def all_ran(place: Path, places: dict[str, str]) -> dict[str, Ran]:
    """Every mistake's program, two at a time."""

    def run(mistake: Mistake) -> Ran:
        flags = [flag.format(**places) for flag in mistake.flags]
        runs = place / "mistakes" / "runs" / mistake.name
        return run_step(
            mistake.step, [*flags, "--output_dir", runs, "--data_output_path", runs / "cache"], mistake.ranks
        )

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((mistake.name for mistake in MISTAKES), pool.map(run, MISTAKES), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_one_sentence_and_code_two(all_ran, places, mistake: Mistake):
    ran = all_ran[mistake.name]
    assert ran.code == 2, ran.words
    sentences = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, ran.words
    assert "Traceback" not in ran.stderr + ran.stdout and "safetensors" not in ran.stderr, ran.words
    for words in mistake.words:
        assert words.format(**places) in ran.stderr, ran.words
    if mistake.name != "several_at_once":  # which lists them, one a line
        assert ran.stderr.strip() == sentences[0], ran.words
