"""Step 3 on two reward functions with weights and no reward model; one that fails on one of two ranks; and with an
advantage estimator and a policy loss of the user's file."""

from __future__ import annotations

import pytest

from tests.end_to_end.compared import figures
from tests.end_to_end.conftest import SHARED, run_step, save_scorer, save_start
from tests.support.json_lines import read_lines

pytestmark = pytest.mark.timeout(900)  # on a busy machine

OWN = """
import os, time

def letters(prompts, responses, *, data_source, **columns):
    counts = [float(sum(letter.isalpha() for letter in response)) for response in responses]
    return [count / 10 for count in counts], {"count": counts}

def slow_on_one_rank(prompts, responses, **columns):
    if os.environ.get("RANK") == "1":
        time.sleep(600)
    return [0.0] * len(responses)
"""


@pytest.fixture(scope="module")
def flags(place, pairs_file) -> list[object]:
    (place / "own_rewards.py").write_text(OWN)
    return [
        *("--actor_model_name_or_path", save_start(place / "start_of_rewards", pad_is_eos=True)),
        *("--data_path", f"jsonl:{pairs_file}", "--data_output_path", place / "rewards_cache", *SHARED.split()),
        *"--dtype fp32 --actor_learning_rate 1e-3 --max_train_steps 2 --max_answer_seq_len 8".split(),
        *"--num_samples_per_prompt 2 --per_device_generation_batch_size 4 --per_device_training_batch_size 8".split(),
    ]


@pytest.fixture(scope="module")
def critic(place, flags):
    return save_scorer(place / "critic_of_rewards", place / "start_of_rewards")


@pytest.mark.parametrize("algorithm", ["rloo --dynamic_sampling_tries 1", "gae"])
def test_the_weighted_sum_of_two_functions(place, flags, critic, algorithm):
    """Without the reward model; the critic of gae is loaded all the same."""
    folder = place / f"rewards_{algorithm[:4].strip()}"
    reward = f"{place / 'own_rewards.py'}:letters:2.0,length:0.5"
    own = [*flags, "--reward", reward, *f"--reward_length_characters 20 --advantage {algorithm}".split()]
    own += ["--critic_model_name_or_path", critic] if algorithm == "gae" else []
    ran = run_step(3, [*own, "--output_dir", folder])
    assert ran.code == 0, ran.words
    assert (folder / "model").is_dir() and (folder / "critic").exists() == (algorithm == "gae")
    lines = read_lines(folder / "metrics.jsonl")
    trained = [line for line in lines if "rollout/score" in line]
    assert len(trained) == 2
    for line in trained:
        letters, length = line["reward/letters"], line["reward/length"]
        assert line["rollout/score"] == pytest.approx(2.0 * letters + 0.5 * length, abs=1e-5)
        assert line["reward/letters/count"] == pytest.approx(10 * letters, abs=1e-4) and letters > 0
    samples = read_lines(folder / "samples.jsonl")
    for sample in samples:
        count = sum(letter.isalpha() for letter in sample["response"])
        length = max(0.0, 1 - abs(len(sample["response"]) - 20) / 20)
        assert sample["reward/letters/count"] == count and sample["reward/length"] == pytest.approx(length, abs=1e-6)
        assert sample["reward"] == pytest.approx(2.0 * count / 10 + 0.5 * length, abs=1e-5)
    (before,) = [line for line in lines if line["step"] == 0]
    first = [sample for sample in samples if sample["step"] == 0]
    for name in ("reward", "reward/letters", "reward/letters/count", "reward/length"):
        mean = sum(sample[name] for sample in first) / len(first)
        assert before[f"eval/{name}"] == pytest.approx(mean)


def test_a_function_that_hangs_on_one_rank_ends_the_run_on_both(place, flags):
    own = [*flags, "--reward", f"{place / 'own_rewards.py'}:slow_on_one_rank", "--advantage", "rloo"]
    ran = run_step(3, [*own, "--reward_timeout", 2, "--output_dir", place / "slow_reward"], ranks=2)
    assert ran.code != 0
    assert ran.stderr.count("error: reward function 'slow_on_one_rank' did not return within --reward_timeout 2 s") == 1


ALGORITHM = """
import torch
from training.step3_ppo.advantages import Estimator
from training.step3_ppo.advantages.inputs import group_centred

def lead(inputs, settings):
    return inputs.on_tokens(group_centred(inputs.outcomes_B, inputs.group_B)), None

leads = Estimator(lead, needs_groups=True)

def plain_gradient(tokens, settings):
    return -tokens.advantages_M * tokens.logprobs_M, torch.zeros_like(tokens.sequence_M, dtype=torch.bool)
"""


def test_an_estimator_and_a_policy_loss_of_the_users_file(place, flags):
    """Written again in the user's file, Dr. GRPO's advantages and GPG's loss give the metrics of the built-in ones."""
    file = place / "own_algorithm.py"
    file.write_text(ALGORITHM)
    both = [*flags, *"--reward length --reward_length_characters 20".split()]
    found = []
    for name, algorithm in (
        ("own", f"--advantage {file}:leads --policy_loss {file}:plain_gradient"),
        ("built_in", "--advantage grpo --norm_adv_by_std false --policy_loss gpg"),
    ):
        ran = run_step(3, [*both, *algorithm.split(), "--output_dir", place / f"algorithm_{name}"])
        assert ran.code == 0, ran.words
        found.append(figures(place / f"algorithm_{name}"))
    assert found[0] == found[1] and any(line.get("actor/policy_loss") for line in found[0])
    missing = [*both, "--advantage", f"{file}:lags", "--output_dir", place / "algorithm_missing"]
    ran = run_step(3, missing)
    assert ran.code == 2 and "--advantage: " in ran.words and "has no 'lags'; did you mean 'leads'" in ran.words
