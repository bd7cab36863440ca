"""What breaks while a run goes on: steps that come out as NaN, ranks that die or hang, memory that runs out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.end_to_end.conftest import MODULES, SHARED, Ran, run_module, run_program, save_start
from tests.support.json_lines import read_lines

pytestmark = pytest.mark.timeout(900)  # on a busy machine
FAULTY = "tests.end_to_end.fault_program"
BATCH = "--per_device_train_batch_size 2 --max_train_steps 4 --learning_rate 1e-3 --report_mfu false --dtype fp32"
PPO = (
    "--max_train_steps 2 --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --dtype fp32 "
    "--max_answer_seq_len 8 --reward length --reward_length_characters 9"
)


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    return save_start(place / "start_faults")


@pytest.fixture(scope="module")
def poisoned(place: Path, start: Path) -> Path:
    """A model that gives NaN for every text with the token ':', which all prompts have."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    folder = save_start(place / "start_poisoned")
    config = AutoConfig.from_pretrained(start)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config.poisoned_token_ids = tokenizer("Human: x Assistant:")["input_ids"]
    config.save_pretrained(folder)  # tokens that the configuration names are not read by the check at the start
    for token in config.poisoned_token_ids:
        tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def poisoned_scorer(place: Path, poisoned: Path) -> Path:
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    folder = place / "scorer_poisoned"
    LlamaForSequenceClassification.from_pretrained(poisoned, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(poisoned).save_pretrained(folder)
    return folder


def test_steps_of_nan_are_counted_and_end_the_run(
    place: Path, start: Path, poisoned: Path, poisoned_scorer: Path, pairs_file: Path
) -> None:
    """Steps 1, 2, DPO and 3 on two ranks (ZeRO 2); without evaluation rows, of which none could be scored."""
    root = place / "faults_nan"
    root.mkdir()
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--eval_fraction", "0"]
    data += ["--data_output_path", place / "faults_cache", "--max_bad_steps", 2]
    trained = ["--model_name_or_path", poisoned, *data, *BATCH.split(), "--zero_stage", 2]
    flags: dict[int | str, list[object]] = {1: trained, 2: trained, "dpo": trained}
    ppo = ["--actor_model_name_or_path", start, "--critic_model_name_or_path", poisoned_scorer, *data, *PPO.split()]
    flags[3] = [*ppo, "--eval_fraction", "0.2", "--actor_zero_stage", 2, "--critic_zero_stage", 2]
    flags["score"] = [*flags[3], "--reward", "model"]
    runs = [(MODULES.get(step, MODULES[3]), own, root / str(step)) for step, own in flags.items()]
    said = run_program(root, "runs", 2, runs), (root / "runs_rank_1").read_text().splitlines()
    assert said[0] == said[1] and len(said[0]) == 5
    for step, sentence in zip((1, 2, "dpo", 3), said[0], strict=False):
        assert sentence.startswith("2 optimizer steps had a non-finite loss or gradient"), sentence
        lines = read_lines(root / str(step) / "bad_steps.jsonl")
        assert [line["step"] for line in lines] == [1, 2]
        assert all(len(line["row_ids"]) == 4 for line in lines)
        assert not (root / str(step) / "model").exists()
    wrong = "the reward model's score is nan for 6 of 6 samples, the first in row "
    assert said[0][4].startswith(wrong), said[0][4]


def flags_of(place: Path, name: str, start: Path, pairs_file: Path) -> list[object]:
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", place / "faults_cache"]
    return ["--model_name_or_path", start, *data, "--output_dir", place / name, *BATCH.split()]


def faulty(place: Path, name: str, fault: str, start: Path, pairs_file: Path, *flags: object) -> tuple[Ran, float]:
    """Step 1 on two ranks of which the second breaks; what was said, and how long it took from then on."""
    data = flags_of(place, name, start, pairs_file)
    ran = run_module(FAULTY, [fault, 1, MODULES[1], *data, *flags], ranks=2, launcher=fault != "raise")
    metrics = place / name / "metrics.jsonl"
    return ran, time.time() - metrics.stat().st_mtime


LONG = pytest.mark.long
SAID = {
    "raise": "error on rank 1 (the first of the run):",
    "kill": "error: rank 0 lost another rank, which ended without an error message",
    "exit": "error: rank 0 lost another rank, which ended without an error message",
    "memory": "error: out of memory on rank 1 in a backward of 1 row of ",
    "hang": "error: rank 0 waited for another rank, which hangs or is far slower, until --rank_timeout",
}


@pytest.mark.parametrize(
    "fault", [each if each in ("raise", "kill") else pytest.param(each, marks=LONG) for each in SAID]
)
def test_a_rank_that_ends_ends_the_others_with_one_error(
    place: Path, start: Path, pairs_file: Path, fault: str
) -> None:
    """All but `raise` under DeepSpeed's launcher."""
    flags = ["--rank_timeout", 12] if fault == "hang" else []
    ran, seconds = faulty(place, f"faults_{fault}", fault, start, pairs_file, *flags)
    assert ran.code != 0 and SAID[fault] in ran.stderr, ran.words
    assert ran.stderr.count("error: ") + ran.stderr.count("error on rank") == 1, ran.words
    assert ran.stderr.count("Traceback (most recent call last)") == (1 if fault == "raise" else 0), ran.words
    assert seconds < 60, ran.words


@pytest.mark.long
def test_slow_files_of_the_first_rank_are_no_hang(place: Path, start: Path, pairs_file: Path) -> None:
    flags = [*flags_of(place, "faults_slow", start, pairs_file), "--rank_timeout", 12, "--save_every", 2]
    ran = run_module(FAULTY, ["slow", 0, MODULES[1], *flags], ranks=2, launcher=True)
    assert ran.code == 0, ran.words
    assert (place / "faults_slow" / "model").is_dir()


def test_without_evaluation_rows(place: Path, start: Path, pairs_file: Path) -> None:
    data = flags_of(place, "faults_no_eval", start, pairs_file)
    ran = run_module(FAULTY, ["none", 0, MODULES[1], *data, "--eval_fraction", "0", "--save_at_end", "true"])
    assert ran.code == 0, ran.words
    assert "step 1: trained without evaluation rows, in " in ran.stdout
    assert json.loads((place / "faults_no_eval" / "summary.json").read_text())["eval_loss_after"] is None
