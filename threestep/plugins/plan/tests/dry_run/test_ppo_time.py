"""Seconds of a rollout with its updates."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from threestep.plugins.plan.clock.devices import DEVICES
from threestep.plugins.plan.clock.work import TrainingWork, Work
from threestep.plugins.plan.dry_run import ppo_time as dry_run_time
from threestep.plugins.plan.tests.flat_cpu import flat, host_costs
from training.step3_ppo.main import main

SHAPE = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
             vocab_size=512, max_position_embeddings=128)  # fmt: skip


@pytest.fixture
def parts(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))

    def run(*flags: str, critic: bool = True) -> dict[str, float]:
        models = ["--data_path", "embedded", "--actor_model_name_or_path", str(tmp_path)]
        models += ["--critic_model_name_or_path", str(tmp_path)] if critic else []
        lengths = ["--max_prompt_seq_len", "32", "--max_answer_seq_len", "32", "--output_dir", str(tmp_path / "run")]
        main([*models, *lengths, "--dry_run", "true", "--device", "h100", *flags])
        table = capsys.readouterr().out.partition("seconds of one rollout")[2]
        return {name.strip(): float(spent) for name, spent in re.findall(r"^  (\S.*?) +([\d.]+)$", table, re.M)}

    return run


def test_every_model_and_phase_has_its_part(parts):
    found = parts("--actor_zero_stage", "3", "--critic_zero_stage", "3", "--num_ranks", "16")
    assert {"prefill", "decode", "weights to the rollout", "scores of the reward model", "scores of the reference",
            "actor: launches by the host", "critic: launches by the host"} <= set(found)  # fmt: skip
    total = found.pop("one rollout")
    assert sum(found.values()) == pytest.approx(total, abs=1e-3)
    assert found["decode"] > found["prefill"]


def test_what_is_not_done_takes_no_time(parts):
    found = parts("--advantage", "grpo", "--num_samples_per_prompt", "2", "--reward", "length", "--kl_coef", "0",
                  "--reward_length_characters", "9", critic=False)  # fmt: skip
    assert not any("critic" in name or "reference" in name or "reward model" in name for name in found)
    assert "weights to the rollout" not in found and "scores of the actor" in found


def test_scores_of_sharded_roles_wait_for_their_weights(parts):
    """By hand: 16 ranks in two nodes gather three layers with 15 hops of 6 us each; the first layer's are waited for,
    and the others are longer than a forward of so small a model."""
    apart = ("--num_ranks", "16", "--reuse_forwards", "false", "--reuse_values", "false")
    whole, sharded = (parts(*apart, "--actor_zero_stage", stage, "--critic_zero_stage", stage) for stage in "03")
    for role in ("actor", "reference", "critic", "reward model"):
        name = f"scores of the {role}"
        assert 15 * 6e-6 < sharded[name] - whole[name] < 3 * 15 * 6e-6 + 2e-4


def test_epochs_repeat_the_updates(parts):
    once, twice = parts(), parts("--ppo_epochs", "2")
    assert twice["actor: launches by the host"] == pytest.approx(2 * once["actor: launches by the host"], rel=1e-2)
    assert twice["decode"] == once["decode"]


def test_a_measured_cpu_draws_by_its_products_and_logits(parts, tmp_path):
    """Three layers of seven products, and the output layer: 22 of 1e-4 seconds a token; 2 rows of 512 logits, each of
    1e-6. 32 tokens."""
    found = {}
    for product, logit in ((0.0, 0.0), (1e-4, 0.0), (0.0, 1e-6)):
        measured = flat(1e9, host_costs(1e-5, 1e-5, token=(0.0, logit)))._replace(thin_products=((1.0, product),))
        (tmp_path / "cpu.json").write_text(replace(DEVICES["h100"], memory_gb=0.0, measured=measured).as_json())
        sizes = ("--per_device_generation_batch_size", "2", "--per_device_training_batch_size", "2")
        found[product, logit] = parts("--device", str(tmp_path / "cpu.json"), "--dtype", "fp32", *sizes)["decode"]
    bare = found.pop((0.0, 0.0))
    assert found[1e-4, 0.0] - bare == pytest.approx(32 * 22 * 1e-4, abs=1e-4)
    assert found[0.0, 1e-6] - bare == pytest.approx(32 * 2 * 512 * 1e-6, abs=1e-4)


@pytest.mark.parametrize(("share", "prompts", "documents", "tokens"), [(1.0, 2, 2, 200), (0.5, 3, 3, 167)])
def test_responses_share_their_prompts(share, prompts, documents, tokens):
    """Of 4 sequences with prompts of 100 and responses of 50 tokens, two of a prompt: two prompts where all of a
    rollout are together, 4 x (1 - 0.5^2) / (0.5 x 2) = 3 where half of them are. A pair counts one here."""

    def count(model, rows, length, targets):
        assert (rows, length, targets) == (documents, tokens, 7)
        pairs = rows * length * (length + 1) / 2
        return TrainingWork(Work(attention_flops=pairs), Work(attention_flops=2 * pairs), Work(moved_bytes=3))

    ppo = SimpleNamespace(num_samples_per_prompt=2, padded=False)
    rows = SimpleNamespace(max_prompt_seq_len=100)
    flags = SimpleNamespace(ppo=ppo, data=SimpleNamespace(rows=rows), longest_tokens=150)
    work = dry_run_time._work_of(count, None, SimpleNamespace(rows=4, targets=7), flags, share=share)
    seen = prompts * 100 * 101 / 2 + 4 * (50 * 100 + 50 * 51 / 2)
    assert work.forward.attention_flops == pytest.approx(seen)
    assert work.backward.attention_flops == pytest.approx(2 * seen) and work.head == Work(moved_bytes=3)
