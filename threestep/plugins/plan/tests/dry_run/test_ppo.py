"""Step 3's dry run: the roles that the flags ask for, the rollout's part, and what leaves the device."""

from __future__ import annotations

import json
import re

import pytest

from training.step3_ppo.main import main

SHAPE = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             vocab_size=512, max_position_embeddings=128)  # fmt: skip


@pytest.fixture
def said(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))

    def run(*flags: str, critic: bool = True) -> str:
        models = ["--data_path", "embedded", "--actor_model_name_or_path", str(tmp_path)]
        models += ["--critic_model_name_or_path", str(tmp_path)] if critic else []
        lengths = ["--max_prompt_seq_len", "32", "--max_answer_seq_len", "32", "--output_dir", str(tmp_path / "run")]
        assert main([*models, *lengths, "--dry_run", "true", *flags]) is None
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().out

    return run


def test_four_roles_and_a_rollout(said):
    text = said()
    for role in ("actor: weights", "critic: weights", "reference: weights", "reward model: weights"):
        assert role in text
    # 16 sequences of 64 tokens: 2 layers x 2 x 64 numbers x 2 bytes x 16 x 64
    assert "rollout: key-value cache, 16 x 64" in text and "the actor's weights, whole" not in text
    assert "+ rollout: the layer of the cache that is copied" in text
    assert "most at once, rolling out" in text and "most at once, in a backward of the critic" in text


def test_a_rule_alone_needs_one_model(said):
    text = said("--advantage", "grpo", "--num_samples_per_prompt", "2", "--reward", "length", "--kl_coef", "0",
                "--reward_length_characters", "9", critic=False)  # fmt: skip
    assert "actor: weights" in text
    assert not re.search("critic: |reference: |reward model: ", text)


def test_adapters_are_their_own_reference_and_zero_3_gathers_for_a_rollout(said):
    text = said("--actor_lora_dim", "4", "--actor_zero_stage", "3", "--num_ranks", "2", "--enable_ema", "true")
    assert "reference: " not in text and "moving average" in text
    assert "actor: weights, sharded" in text and "rollout: the actor's weights, whole" in text


@pytest.mark.parametrize("lora", ["0", "4"])
def test_a_head_for_multi_token_prediction_is_counted(said, lora):
    """A block of 41,088 weights (attention 4 x 64 x 64, MLP 3 x 64 x 128, two norms), the projection's 128 x 64, and
    three norms more, at 2 bytes in bfloat16, with 12 for the optimizer."""
    text = said("--mtp_num_layers", "2", "--actor_lora_dim", lora, "--device_memory_gb", "80", "--device", "cuda")
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64 + 128 * 64 + 3 * 64)
    assert f"multi-token prediction: a head of 2, {weights:,} weights" in text
    lines = dict(re.findall(r"\n  (mtp: [a-z]+)[^\d]*(?:32 weights)? +([\d.]+) ", text))
    assert {"mtp: weights", "mtp: gradients", "mtp: optimizer"} <= lines.keys(), text
    assert "in the head's optimizer step" in text and "mtp: " not in said("--actor_lora_dim", lora)


def test_the_exact_kl_holds_logits(said):
    assert "logits of two models" in said("--kl_estimator", "full")


def test_forwards_that_are_kept_are_held_together(said):
    def held(text: str, what: str) -> float:
        return float(re.search(rf"  (?:\+ )?{what} +([\d.]+) ", text)[1])

    flags = ("--per_device_generation_batch_size", "16", "--max_tokens_per_micro_batch", "1280")
    flags += ("--max_answer_seq_len", "96", "--actor_gradient_checkpointing", "false")
    apart, kept = (said(*flags, "--reuse_forwards", given) for given in ("false", "true"))
    # 16 sequences of at most 128 tokens, 1,280 a forward: two forwards of the actor, of which the critic's meets both.
    own = held(apart, "actor: activations")
    assert "activations, kept" not in apart
    for role, forwards in (("actor", 1), ("critic", 2)):
        peaks = [held(text, f"most at once, in a backward of the {role}") for text in (apart, kept)]
        assert peaks[1] - peaks[0] == pytest.approx(forwards * own, abs=0.003)


@pytest.mark.parametrize(
    ("kind", "reuses", "tokens"), [("cpu", "false", "2,048"), ("cpu", "true", "2,048"), ("cuda", "true", "2,560")]
)
def test_forwards_on_a_cpu_are_counted_small(said, kind, reuses, tokens):
    """40 sequences of 64 tokens are 2,560; 32 of them are 2,048."""
    sizes = ("--per_device_generation_batch_size", "40", "--per_device_training_batch_size", "40")
    text = said(*sizes, "--device", kind, "--reuse_forwards", reuses)
    assert f"a forward of one rank holds at most {tokens} tokens" in text


def test_forwards_are_reused_by_default_where_the_memory_holds_them(said):
    read = "true (the forwards that read are learned from; false turns it off)"
    text = said("--device", "cuda", "--device_memory_gb", "80")
    assert f"auto: --reuse_values {read}, --reuse_forwards {read}" in text and "the actor's activations, kept" in text
    tight = said("--device", "cuda", "--device_memory_gb", "0.01")
    assert re.search(
        r"auto: --reuse_values true \(.*, --reuse_forwards false \(true may take 0\.0\d+ GB, and 0\.01 are free\)",
        tight,
    )
    assert "activations, kept" not in tight
    assert "auto: " not in said("--reuse_forwards", "false", "--reuse_values", "false")
    several = "false (a rollout has 2 optimizer steps)"
    assert f"auto: --reuse_values {several}, --reuse_forwards {several}" in said("--ppo_epochs", "2")


def test_a_cpu_keeps_no_forwards_that_take_much_of_its_memory(said):
    """Its memory is not the run's alone: graphs may take it to twice as much, which those of 80 sequences exceed
    and those of 64 do not."""
    many = ("--per_device_generation_batch_size", "80", "--per_device_training_batch_size", "80")
    found = re.search(
        r"--reuse_forwards false \(true is faster and takes ([\d.]+) GB instead of ([\d.]+)\)", said(*many)
    )
    assert found is not None and float(found[1]) > 2 * float(found[2])
    few = ("--per_device_generation_batch_size", "64", "--per_device_training_batch_size", "64")
    assert "--reuse_forwards true (the forwards that read are learned from; false turns it off)" in said(*few)


def test_a_frozen_model_in_shards_is_gathered_for_its_forward(said):
    text = said("--critic_zero_stage", "3", "--num_ranks", "2")
    assert "most at once, in a forward of the reward model" in text and "forward of the reference" not in text
    assert "+ reward model: gathered weights" in text


def test_a_laptop_plans_a_gpu(said):
    flags = ("--num_ranks", "2", "--actor_zero_stage", "2", "--offload", "true", "--critic_zero_stage", "2")
    here, there = said(*flags), said(*flags, "--device", "cuda", "--device_memory_gb", "80")
    assert '"overlap_comm": false' in here and '"overlap_comm": true' in there and '"pin_memory": true' in there
    assert "lengths of runs" in there and "lengths of runs" not in here
    assert there.rstrip().endswith("% of it") and "this fits a GPU of 80 GB (74.5 GiB): " in there
    assert "a GPU of" not in here


def test_rollouts_ahead_hold_the_weights_of_their_steps(said):
    """On a CPU beside training; on a GPU hf draws before the step."""
    beside = said("--rollouts_ahead", "2", "--device", "cpu")
    assert "rollouts ahead: the actor's weights, 2 x" in beside and "+ rollout: key-value cache" not in beside
    assert "the actor's weights, 3 x" in said("--rollouts_ahead", "free", "--device", "cpu")
    before = said("--rollouts_ahead", "2", "--device", "cuda", "--device_memory_gb", "80")
    assert "+ rollouts ahead: the actor's weights, 1 x" in before and "+ rollout: key-value cache" in before
