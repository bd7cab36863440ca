"""Rows over several ranks by the command line: the weights of one rank, a checkpoint that does not depend on the size
of a group, and what ends a run in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.conftest import run_step
from tests.support.new_models import save_new_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # on a busy machine

DATA = "--data_path embedded --max_seq_len 96 --max_train_rows 16 --max_eval_rows 4 --eval_interval 0 --dtype fp32"
SFT = f"{DATA} --learning_rate 1e-3 --max_train_steps 3 --zero_stage 1 --lr_scheduler_type constant".split()
WHOLE, SHARED = ["--per_device_train_batch_size", 4], ["--per_device_train_batch_size", 4, "--sequence_parallel_size"]


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    return save_new_model(place / "shared_rows_start", vocab_size=353)


def weights(folder: Path) -> torch.Tensor:
    tensors = load_file(folder / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_share_rows_and_one_goes_on_alone(place: Path, start: Path):
    """The first step on two ranks that share every row, the others on one: weights and figures are those of one."""
    model = ["--model_name_or_path", start]
    alone, shared = place / "long_alone", place / "long_shared"
    assert (ran := run_step(1, [*model, *SFT, *WHOLE, "--output_dir", alone])).code == 0, ran.words
    first = [*SFT, "--max_train_steps", 1, "--save_at_end", "true", "--output_dir", shared]
    assert (ran := run_step(1, [*model, *first, *SHARED, 2], ranks=2)).code == 0, ran.words
    rest = [*SFT, *WHOLE, "--output_dir", shared, "--resume"]
    assert (ran := run_step(1, [*model, *rest])).code == 0, ran.words
    start_weights = load_file(start / "model.safetensors")
    moved = weights(alone) - torch.cat([start_weights[name].flatten() for name in sorted(start_weights)])
    assert float((weights(alone) - weights(shared)).norm() / moved.norm()) < 1e-3
    for name in ("train/loss", "train/token_accuracy", "train/grad_norm"):
        figures = [[line[name] for line in metrics(folder) if name in line] for folder in (alone, shared)]
        assert len(figures[0]) == 3 and figures[1] == pytest.approx(figures[0], rel=1e-4), name
    first_evaluations = [next(line["eval/loss"] for line in metrics(folder)) for folder in (alone, shared)]
    assert first_evaluations[1] == pytest.approx(first_evaluations[0], rel=1e-5)


@pytest.mark.parametrize("step", [2, "dpo"])
def test_the_other_steps(place: Path, start: Path, step: int | str):
    folders = []
    for name, flags, ranks in (("alone", WHOLE, 1), ("shared", [*SHARED, 2], 2)):
        folders.append(place / f"long_{step}_{name}")
        flags = ["--model_name_or_path", start, *SFT, *flags, "--output_dir", folders[-1]]
        assert (ran := run_step(step, flags, ranks=ranks)).code == 0, ran.words
    for name in ("train/loss", "eval/loss", "eval/accuracy"):
        alone, shared = ([line[name] for line in metrics(folder) if name in line] for folder in folders)
        assert alone and shared == pytest.approx(alone, rel=1e-4), name


def test_step_3(place: Path, start: Path):
    """Two ranks that share rows, and the same two without: equal responses, figures and weights."""
    flags = "--max_answer_seq_len 10 --max_prompt_seq_len 60 --max_train_steps 2 --reward length --dtype fp32 --seed 3"
    flags += " --reward_length_characters 12 --per_device_generation_batch_size 4 --num_samples_per_prompt 2"
    flags += " --actor_learning_rate 1e-3 --advantage grpo --data_path embedded --max_train_rows 32 --max_eval_rows 4"
    folders = []
    for size in (1, 2):
        folders.append(place / f"long_ppo_{size}")
        given = ["--actor_model_name_or_path", start, *flags.split(), "--output_dir", folders[-1]]
        assert (ran := run_step(3, [*given, "--sequence_parallel_size", size], ranks=2)).code == 0, ran.words
    alone, shared = map(weights, folders)
    assert float((alone - shared).abs().max()) < 1e-4
    for name in ("actor/policy_loss", "actor/kl_loss", "rollout/reward"):
        figures = [[line[name] for line in metrics(folder) if name in line] for folder in folders]
        assert figures[1] == pytest.approx(figures[0], rel=1e-3, abs=1e-6), name


def test_a_dry_run_counts_a_slice(start: Path):
    """Of the rows; weights, gradients and the optimizer's states stay those of two ranks."""
    found = {}
    for size in (1, 2):
        flags = ["--model_name_or_path", start, *SFT, "--dry_run", "true", "--num_ranks", 2]
        ran = run_step(1, [*flags, "--sequence_parallel_size", size, "--per_device_train_batch_size", 4])
        assert ran.code == 0, ran.words
        found[size] = ran.stdout
        assert "+ activations" in ran.stdout
    assert "an optimizer step uses 8 sequences (4 x 2 ranks x 1)" in found[1]
    assert "an optimizer step uses 4 sequences (4 x 1 groups of 2 ranks x 1); a forward on one group" in found[2]
