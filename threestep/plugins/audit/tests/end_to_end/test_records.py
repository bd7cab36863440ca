"""Our steps write records by their command lines, in which the judge finds nothing wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_step
from tests.support.new_models import save_new_model
from threestep.plugins.audit.judge import AGREES, DIFFERS, judge
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.files import read_record
from threestep.plugins.audit.text import verdict

pytestmark = pytest.mark.timeout(900)  # on a busy machine

DATA = "--data_path embedded --max_seq_len 64 --max_train_rows 32 --max_eval_rows 4 --eval_interval 0".split()
ROLLOUT = (
    "--max_answer_seq_len 10 --max_prompt_seq_len 40 --max_train_steps 2 --reward length --reward_length_characters 12 "
    "--per_device_generation_batch_size 4 --num_samples_per_prompt 2 --actor_learning_rate 1e-3"
)


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    return save_new_model(place / "records_start")


# step, flags, ranks, quantities that must be judged
WHOLE = "logprobs loss micro_losses gradients grad_norm clipped_gradients learning_rate weights_after"
CASES = {
    "sft packed bf16 2 ranks": (
        1, "--dtype bf16 --max_tokens_per_micro_batch 96 --zero_stage 2 --record_values true", 2, WHOLE,
    ),
    "sft padded fp32": (
        1, "--dtype fp32 --padded true --max_tokens_per_micro_batch 128", 1, "loss_mask loss micro_losses",
    ),
    "sft LoRA under ZeRO-3": (
        1, "--dtype fp32 --zero_stage 3 --lora_dim 4 --lora_learning_rate 5e-3 --weight_decay 0.1 --record_values true",
        2, "logprobs gradients clipped_gradients learning_rate weights_after",
    ),
    "sft bf16 under ZeRO-1": (
        1, "--dtype bf16 --zero_stage 1 --record_values true", 2, "gradients clipped_gradients weights_after",
    ),
    "sft z-loss, shared beginnings": (1, "--dtype fp32 --z_loss_coef 1e-3 --share_beginnings 2", 1, "loss_mask loss"),
    "dpo orpo fp32": ("dpo", "--dtype fp32 --loss_type orpo --record_values true", 1, "loss gradients"),
    "dpo a sum, lengths, beta's schedule": (
        "dpo", "--dtype fp32 --loss_type sigmoid:0.8,sft:0.2 --ld_alpha 0.4 --final_beta 0.3 --record_values true", 1,
        "logprob_sums beta loss gradients",
    ),
    "dpo packed fp32 2 ranks": (
        "dpo", "--dtype fp32 --max_tokens_per_micro_batch 160", 2, "loss_mask logprob_sums loss",
    ),
    "dpo ipo bf16": ("dpo", "--dtype bf16 --loss_type ipo", 1, "loss_mask logprob_sums loss grad_norm"),
    "reward bf16": (
        2, "--dtype bf16 --max_tokens_per_micro_batch 160 --label_smoothing 0.1", 1, "denominator loss",
    ),
    "remax cispo fp32": (
        3, f"{ROLLOUT} --dtype fp32 --advantage remax --policy_loss cispo --kl_in loss --record_values true", 1,
        "rollout_advantages policy_loss kl_loss gradients",
    ),
    "grpo bf16 2 ranks": (
        3, f"{ROLLOUT} --dtype bf16 --advantage grpo --kl_in loss", 2,
        "rollout_advantages advantages policy_loss kl_loss",
    ),
    "rloo fp32, KL in the reward": (
        3, f"{ROLLOUT} --dtype fp32 --advantage rloo --ppo_epochs 2", 1,
        "rollout_rewards rollout_advantages policy_loss",
    ),
}  # fmt: skip
SHORT = ("sft packed bf16 2 ranks", "dpo ipo bf16", "grpo bf16 2 ranks")  # of every run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in CASES]
)
def test_the_records_of_our_steps_are_right(place: Path, start: Path, name: str):
    step, flags, ranks, words = CASES[name]
    needed = words.split()
    folder = place / f"records_{name.replace(' ', '_')}"
    model = "--actor_model_name_or_path" if step == 3 else "--model_name_or_path"
    size = [] if step == 3 else ["--per_device_train_batch_size", 8, "--learning_rate", 1e-3]
    own = [model, start, "--data_output_path", place / "records_cache", "--output_dir", folder, "--record_steps", 1, 2]
    ran = run_step(step, [*own, *DATA, *size, *flags.split()], ranks)
    assert ran.code == 0, ran.words
    records = sorted((folder / "records").iterdir())
    assert len(records) >= 2
    for record in records:
        findings = judge(AuditedStep(read_record(record)))
        states = {finding.name: finding.state for finding in findings}
        assert DIFFERS not in states.values(), (record.name, verdict(findings))
        assert {quantity: states[quantity] for quantity in needed} == dict.fromkeys(needed, AGREES)
    assert f"recorded this step in {records[0]}" in ran.stdout
