"""A command line as DeepSpeed-Chat's users have it, for step 3 on one GPU, runs as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.conftest import Ran, run_step, save_start

pytestmark = pytest.mark.timeout(900)  # on a busy machine

# What is smaller here than there: models, lengths and batches, and float32 for the comparison of weights.
LINE = """
    --data_path {data} --data_split 2,4,4 --data_output_path {cache}
    --actor_model_name_or_path {actor} --critic_model_name_or_path {critic} --num_padding_at_beginning 1
    --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --generation_batches 1 --ppo_epochs 1
    --max_prompt_seq_len 64 --max_answer_seq_len 6 --actor_learning_rate 5e-3 --critic_learning_rate 5e-4
    --actor_weight_decay 0.1 --critic_weight_decay 0.1 --num_train_epochs 1 --lr_scheduler_type cosine
    --gradient_accumulation_steps 2 --num_warmup_steps 0 --deepspeed --seed 1234 --enable_hybrid_engine
    --inference_tp_size 1 --tp_gather_partition_size 8 --actor_zero_stage 2 --critic_zero_stage 2
    --actor_gradient_checkpointing --actor_dropout 0.0 --disable_critic_dropout --actor_lora_dim 4
    --actor_lora_module_name layers. --actor_lora_learning_rate 5e-3 --only_optimize_lora --offload_reference_model
    --enable_ema --enable_tensorboard --tensorboard_path step3 --print_answers --print_answers_interval 1
    --enable_test_mode --test_stop_step 2 --dtype bf16 --align_overflow --local_rank=0 --output_dir {out}
"""


@pytest.fixture(scope="module")
def ran(place: Path, pairs_file: Path) -> tuple[Ran, Path]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    actor, critic, out = save_start(place / "theirs"), place / "their_critic", place / "their_step3"
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(actor, num_labels=1).save_pretrained(critic)
    AutoTokenizer.from_pretrained(actor).save_pretrained(critic)
    places = {"cache": place / "their_cache", "actor": actor, "critic": critic, "out": out}
    return run_step(3, LINE.format(data=f"jsonl:{pairs_file}", **places).split()), out


def test_it_runs_and_says_what_it_does_not_need(ran):
    done, _ = ran
    assert done.code == 0, done.words
    lines = done.stdout.splitlines()
    for flag in ("--deepspeed", "--enable_hybrid_engine", "--num_padding_at_beginning", "--print_answers"):
        assert sum(line.startswith(f"{flag} is not needed: ") for line in lines) == 1
    assert sum(line.startswith("--enable_test_mode is read as --max_train_steps 2") for line in lines) == 1


def test_its_settings_mean_what_they_meant(ran):
    _, out = ran
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert settings["generation_batches"] == 2  # rollouts of 2, two accumulated
    assert settings["critic_dropout"] == 0.0 and settings["max_train_steps"] == 2
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/learning_rate" in line] == [1, 2]


def test_the_moving_average_is_a_model_beside(ran):
    """Two steps from the start: nearer to it than the actor is, by the share that the average has taken up."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, out = ran
    start, actor, average = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (out.parent / "theirs", out / "model", out / "model_ema")
    )
    assert AutoTokenizer.from_pretrained(out / "model_ema").eos_token == "<|endoftext|>"
    moved = sum(float((actor[name] - start[name]).norm()) for name in start)
    kept = sum(float((average[name] - start[name]).norm()) for name in start)
    assert moved > 0 and kept < 0.1 * moved
