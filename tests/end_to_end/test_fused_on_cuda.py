"""Programs on a pretended GPU with fused operations, which are plain PyTorch here (`tests/support/plain_kernels.py`):
the flag reaches every model, the log says so, and the losses are those of the models' own operations."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from pathlib import Path

import pytest

FLAGS = (
    "--data_split 2,2,2 --eval_fraction 0.2 --max_prompt_seq_len 64 --num_workers 1 --dtype fp32 --max_train_steps 2 "
    "--report_mfu false"
)
ONE_MODEL = "--max_seq_len 100 --per_device_train_batch_size 2 --learning_rate 1e-3"
ROLLOUTS = "--per_device_generation_batch_size 4 --per_device_training_batch_size 4 --max_answer_seq_len 6"
NOTE = "norms, gates and rotations are Liger's kernels"


def files(place: str) -> bool:
    from tests.support.forked_runs import make_files

    make_files(Path(place), rows=60)
    return True


def said_by(module: str, flags: list[str]) -> tuple[str, int]:
    """Run the program as if Liger Kernel were installed; return its log, and how many models were fused."""
    import threestep.plugins.speed.fused.choice as choice
    from tests.support.plain_kernels import plain_kernels

    fuse, fused = choice.fuse, []
    choice.liger_kernels = lambda: plain_kernels("cuda")
    choice.fuse = lambda model, kernels: (fused.append(model), fuse(model, kernels))[1]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        importlib.import_module(f"training.{module}.main").main(flags)
    return said.getvalue(), len(fused)


@pytest.fixture(scope="module")
def place(on_cuda, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fused_on_cuda")
    on_cuda(files, folder)
    return folder


def ran(on_cuda, place: Path, module: str, name: str, more: str) -> tuple[str, int, list[float]]:
    """The log, the number of fused models, and the losses (in step 3 the norms of the actor's gradients)."""
    words = f"--data_path jsonl:{place}/pairs.jsonl --data_output_path {place}/cache {FLAGS} {more}".split()
    said, count = on_cuda(said_by, module, [*words, "--output_dir", str(place / name)])
    lines = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
    loss = "actor/grad_norm" if module == "step3_ppo" else "train/loss"
    return said, count, [line[loss] for line in lines if loss in line]


def test_a_step_with_one_model_fuses_by_itself(on_cuda, place):
    start = f"--model_name_or_path {place}/start {ONE_MODEL}"
    said, count, fused = ran(on_cuda, place, "step1_sft", "fused", start)
    plain_said, none, plain = ran(on_cuda, place, "step1_sft", "plain", f"{start} --use_liger_kernel false")
    assert (said.count(NOTE), count, none) == (1, 1, 0) and NOTE not in plain_said
    assert fused == pytest.approx(plain, rel=1e-5) and len(plain) == 2


def test_step_three_fuses_all_models_where_it_is_asked(on_cuda, place):
    start = f"--actor_model_name_or_path {place}/start --reward length --reward_length_characters 8 {ROLLOUTS}"
    start += " --advantage grpo --num_samples_per_prompt 2"
    said, count, fused = ran(on_cuda, place, "step3_ppo", "fused_ppo", f"{start} --use_liger_kernel true")
    plain_said, none, plain = ran(on_cuda, place, "step3_ppo", "plain_ppo", start)
    assert (said.count(NOTE), count, none) == (1, 2, 0) and NOTE not in plain_said  # of the actor; with the reference
    assert fused == pytest.approx(plain, rel=1e-4) and len(plain) == 2
