"""What breaks while a run goes on: steps that come out as NaN, ranks that die or hang, memory that runs out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.distributed.launch import ROOT, run_ranks
from tests.end_to_end.conftest import MODULES, SHARED, Ran, run_module, save_start

pytestmark = pytest.mark.timeout(900)  # on a busy machine
PROGRAM = ROOT / "tests" / "end_to_end" / "resume_program.py"
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
    runs = [
        {
            "module": MODULES.get(step, MODULES[3]),
            "flags": [str(flag) for flag in [*own, "--output_dir", root / str(step)]],
            "note": str(root / "rank_"),
        }
        for step, own in flags.items()
    ]
    (root / "runs.json").write_text(json.dumps({"runs": runs}))
    environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    run_ranks(PROGRAM, 2, [root / "runs.json"], 600, environment)
    said = [(root / f"rank_{rank}").read_text().splitlines() for rank in (0, 1)]
    assert said[0] == said[1] and len(said[0]) == 5
    for step, sentence in zip((1, 2, "dpo", 3), said[0], strict=False):
        assert sentence.startswith("2 optimizer steps had a loss or gradient that is not finite"), sentence
        lines = [json.loads(line) for line in (root / str(step) / "bad_steps.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2]
        assert all(len(line["row_ids"]) == 4 for line in lines)
        assert not (root / str(step) / "model").exists()
    wrong = "the reward model's score is nan for 6 of 6 samples, the first of them row "
    assert said[0][4].startswith(wrong), said[0][4]


def faulty(place: Path, name: str, fault: str, start: Path, pairs_file: Path, *flags: object) -> tuple[Ran, float]:
    """Step 1 on two ranks of which the second breaks; what was said, and how long it took from then on."""
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", place / "faults_cache"]
    data += ["--model_name_or_path", start, "--output_dir", place / name, *BATCH.split(), *flags]
    ran = run_module(FAULTY, [fault, 1, MODULES[1], *data], ranks=2, launcher=fault != "raise")
    metrics = place / name / "metrics.jsonl"
    return ran, time.time() - metrics.stat().st_mtime


SAID = {
    "raise": "error on rank 1, the first of the run:",
    "kill": "error: rank 0 lost another rank, which ended without an error message",
    "exit": "error: rank 0 lost another rank, which ended without an error message",
    "memory": "error: out of memory on rank 1 in a backward of 1 row of ",
    "hang": "error: rank 0 waited for another rank, which hangs or is far slower, until --rank_timeout",
}


def ends_with_one_error(ran: Ran, fault: str) -> None:
    assert ran.code != 0 and SAID[fault] in ran.stderr, ran.words
    assert ran.stderr.count("error: ") + ran.stderr.count("error on rank") == 1, ran.words
    assert ran.stderr.count("Traceback (most recent call last)") == (1 if fault == "raise" else 0), ran.words


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_rank_that_dies_ends_the_others_with_one_error(
    place: Path, start: Path, pairs_file: Path, fault: str
) -> None:
    """A kill by DeepSpeed's launcher. Other ends of a rank: test_other_ends.py."""
    ran, seconds = faulty(place, f"faults_{fault}", fault, start, pairs_file)
    ends_with_one_error(ran, fault)
    assert seconds < 60, ran.words


def test_without_evaluation_rows(place: Path, start: Path, pairs_file: Path) -> None:
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", place / "faults_cache"]
    data += ["--model_name_or_path", start, "--output_dir", place / "faults_no_eval", *BATCH.split()]
    ran = run_module(FAULTY, ["none", 0, MODULES[1], *data, "--eval_fraction", "0", "--save_at_end", "true"])
    assert ran.code == 0, ran.words
    assert "step 1: trained, without evaluation rows, in " in ran.stdout
    assert json.loads((place / "faults_no_eval" / "summary.json").read_text())["eval_loss_after"] is None
