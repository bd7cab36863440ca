"""Step 3's dry run: roles, the rollout's part, what leaves the device, and the seconds of all of it."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from threestep.plugins.plan.clock.devices import DEVICES
from threestep.plugins.plan.clock.work import TrainingWork, Work
from threestep.plugins.plan.dry_run import ppo_time as dry_run_time
from threestep.plugins.plan.tests.conftest import flat, host_costs
from training.step3_ppo.main import main

LENGTHS = ("--max_prompt_seq_len", "32", "--max_answer_seq_len", "32")
BY_A_RULE = ("--advantage", "grpo", "--num_samples_per_prompt", "2", "--reward", "length", "--kl_coef", "0",
             "--reward_length_characters", "9")  # fmt: skip


@pytest.fixture
def said(dry_run):
    def run(*flags: str, critic: bool = True, layers: int = 2) -> str:
        roles = ("actor_", "critic_") if critic else ("actor_",)
        return dry_run(main, *LENGTHS, *flags, layers=layers, roles=roles)

    return run


def test_roles_and_a_rollout(said):
    text = said()
    for role in ("actor: weights", "critic: weights", "reference: weights", "reward model: weights"):
        assert role in text
    # 16 sequences of 64 tokens: 2 layers x 2 x 64 numbers x 2 bytes x 16 x 64
    assert "rollout: key-value cache, 16 x 64" in text and "the actor's full weights" not in text
    assert "+ rollout: copy of one layer's cache" in text
    assert "most at once, rolling out" in text and "most at once, in a backward of the critic" in text
    text = said(*BY_A_RULE, critic=False)
    assert "actor: weights" in text
    assert not re.search("critic: |reference: |reward model: ", text)
    assert "both models' logits" in said("--kl_estimator", "full")


def test_what_zero_3_gathers(said):
    text = said("--actor_lora_dim", "4", "--actor_zero_stage", "3", "--num_ranks", "2", "--enable_ema", "true")
    assert "reference: " not in text and "moving average" in text
    assert "actor: weights, sharded" in text and "rollout: the actor's full weights" in text
    text = said("--critic_zero_stage", "3", "--num_ranks", "2")
    assert "most at once, in a forward of the reward model" in text and "forward of the reference" not in text
    assert "+ reward model: gathered weights" in text


@pytest.mark.parametrize("lora", ["0", "4"])
def test_a_head_for_multi_token_prediction_is_counted(said, lora):
    """A block of 41,088 weights (attention 4 x 64 x 64, MLP 3 x 64 x 128, two norms), the projection's 128 x 64, and
    three norms more, at 2 bytes in bfloat16, with 12 for the optimizer."""
    text = said("--mtp_num_layers", "2", "--actor_lora_dim", lora, "--device_memory_gb", "80", "--device", "cuda")
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64 + 128 * 64 + 3 * 64)
    assert f"multi-token prediction: a head with 2 modules, {weights:,} weights" in text
    lines = dict(re.findall(r"\n  (mtp: [a-z]+)[^\d]*(?:32 weights)? +([\d.]+) ", text))
    assert {"mtp: weights", "mtp: gradients", "mtp: optimizer"} <= lines.keys(), text
    assert "in the head's optimizer step" in text and "mtp: " not in said("--actor_lora_dim", lora)


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
    assert f"a forward on one rank holds at most {tokens} tokens" in text


def test_forwards_are_reused_by_default_where_the_memory_holds_them(said):
    read = "true (training can reuse the earlier forwards; false turns it off)"
    text = said("--device", "cuda", "--device_memory_gb", "80")
    assert f"auto: --reuse_values {read}, --reuse_forwards {read}" in text and "the actor's stored activations" in text
    tight = said("--device", "cuda", "--device_memory_gb", "0.011")
    assert re.search(
        r"auto: --reuse_values true \(.*, --reuse_forwards false \(true may need 0\.0\d+ GB, but only "
        r"0\.011 GB are free\)",
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
    slow = r"--reuse_forwards false \(true is faster but needs ([\d.]+) GB instead of ([\d.]+) GB\)"
    found = re.search(slow, said(*many))
    assert found is not None and float(found[1]) > 2 * float(found[2])
    few = ("--per_device_generation_batch_size", "64", "--per_device_training_batch_size", "64")
    assert "--reuse_forwards true (training can reuse the earlier forwards; false turns it off)" in said(*few)


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
    assert "rollouts ahead: the actor's weights, copied 2 x" in beside and "+ rollout: key-value cache" not in beside
    assert "the actor's weights, copied 3 x" in said("--rollouts_ahead", "free", "--device", "cpu")
    before = said("--rollouts_ahead", "2", "--device", "cuda", "--device_memory_gb", "80")
    assert "+ rollouts ahead: the actor's weights, copied 1 x" in before and "+ rollout: key-value cache" in before


@pytest.fixture
def parts(said):
    """By name, the seconds of one rollout."""

    def run(*flags: str, critic: bool = True) -> dict[str, float]:
        table = said("--device", "h100", *flags, critic=critic, layers=3).partition("seconds of one rollout")[2]
        return {name.strip(): float(spent) for name, spent in re.findall(r"^  (\S.*?) +([\d.]+)$", table, re.M)}

    return run


def test_every_model_and_phase_has_its_part_and_what_is_not_done_takes_no_time(parts):
    found = parts("--actor_zero_stage", "3", "--critic_zero_stage", "3", "--num_ranks", "16")
    assert {"prefill", "decode", "sending weights to the rollout", "scores of the reward model",
            "scores of the reference",
            "actor: kernel launches by the host", "critic: kernel launches by the host"} <= set(found)  # fmt: skip
    total = found.pop("one rollout")
    assert sum(found.values()) == pytest.approx(total, abs=1e-3)
    assert found["decode"] > found["prefill"]
    found = parts(*BY_A_RULE, critic=False)
    assert not any("critic" in name or "reference" in name or "reward model" in name for name in found)
    assert "sending weights to the rollout" not in found and "scores of the actor" in found
    once, twice = parts(), parts("--ppo_epochs", "2")
    assert twice["actor: kernel launches by the host"] == pytest.approx(
        2 * once["actor: kernel launches by the host"], rel=1e-2
    )
    assert twice["decode"] == once["decode"]


def test_scores_of_sharded_roles_wait_for_their_weights(parts):
    """By hand: 16 ranks in two nodes gather three layers with 15 hops of 6 us each; the first layer's are waited for,
    and the others are longer than a forward of so small a model."""
    apart = ("--num_ranks", "16", "--reuse_forwards", "false", "--reuse_values", "false")
    whole, sharded = (parts(*apart, "--actor_zero_stage", stage, "--critic_zero_stage", stage) for stage in "03")
    for role in ("actor", "reference", "critic", "reward model"):
        name = f"scores of the {role}"
        assert 15 * 6e-6 < sharded[name] - whole[name] < 3 * 15 * 6e-6 + 2e-4


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
