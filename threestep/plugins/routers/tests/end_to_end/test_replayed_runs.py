"""A mixture of experts trains by the experts of its rollouts; by its own choice, on any ranks, that changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.conftest import run_step
from tests.families.builds import draw_weights
from tests.support.new_models import save_new_model

pytestmark = pytest.mark.timeout(900)  # on a busy machine

STEPS = (
    "--data_path embedded --max_train_rows 16 --max_eval_rows 2 --eval_interval 0 --val_before_train false "
    "--max_answer_seq_len 8 --max_prompt_seq_len 40 --max_train_steps 2 --reward length --reward_length_characters 12 "
    "--num_samples_per_prompt 2 --advantage grpo --dtype fp32 --actor_learning_rate 1e-3"
).split()
AHEAD = "--rollouts_ahead 1"
# Name: flags, ranks.
CASES = {
    "packed": ("", 1),
    "ahead": (AHEAD, 1),
    "2 ranks, ZeRO 3, padded": ("--actor_zero_stage 3 --padded true", 2),
    "a row over 2 ranks": ("--sequence_parallel_size 2 --actor_zero_stage 2 --router_aux_loss_coef 0.1", 2),
    "LoRA, recomputed": ("--actor_lora_dim 4 --only_optimize_lora --actor_gradient_checkpointing", 1),
}


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = save_new_model(place / "mixture_start")
    old = AutoConfig.from_pretrained(folder).to_dict()
    kept = {name: old[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "hidden_size")}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **kept, **sizes, **experts))
    draw_weights(model, seed=0)
    model.save_pretrained(folder)
    return folder


def trained(place: Path, start: Path, name: str, how: str) -> tuple[list[dict], dict[str, torch.Tensor]]:
    flags, ranks = CASES[name]
    folder = place / f"mixture_{list(CASES).index(name)}_{how}"
    sizes = ["--per_device_generation_batch_size", 4 // ranks, "--per_device_training_batch_size", 8 // ranks]
    own = ["--actor_model_name_or_path", start, "--data_output_path", place / "mixture_cache", "--output_dir", folder]
    ran = run_step(3, [*own, *STEPS, *sizes, *flags.split(), "--replay_routers", how], ranks)
    assert ran.code == 0, ran.words
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return metrics, load_file(next((folder / "model").glob("*.safetensors")))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "packed" else [pytest.mark.long]) for name in CASES]
)
def test_following_ones_own_choice_changes_nothing(place: Path, start: Path, name: str):
    metrics, weights = trained(place, start, name, "follow")
    shares = [line["mismatch/experts_differ"] for line in metrics if "mismatch/experts_differ" in line]
    if AHEAD not in CASES[name][0]:
        assert shares == [0.0, 0.0]
        _, alone = trained(place, start, name, "none")
        assert all(torch.equal(weights[each], alone[each]) for each in alone)
    else:
        assert len(shares) == 2  # older weights chose in the second
