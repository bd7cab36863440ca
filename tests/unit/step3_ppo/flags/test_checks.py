"""Names and flags of step 3 are checked before a model loads."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_config
from training.step3_ppo.flags.checks import check_models, checked_components
from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.rewards.rules import gsm8k_reward


def names_of(critic: str = "c", reward: str = "model:1.0", *, roles=None, kl=None, **ppo):
    paths = {"actor_model_name_or_path": "a", "critic_model_name_or_path": critic}
    flags = ppo_flags(**paths, reward=reward, num_samples_per_prompt=2, **(roles or {}), **(kl or {}), **ppo)
    return checked_components(flags)


def test_names_stand_for_parts():
    names = names_of(checker="gsm8k", reward="gsm8k,model:0.5")
    assert names.rollout_engine is TransformersRollout and names.checker is gsm8k_reward
    assert [(reward.name, reward.weight) for reward in names.rewards] == [("gsm8k", 1.0), ("model", 0.5)]
    assert names_of().checker is None


@pytest.mark.parametrize(
    ("reward", "advantage", "with_model", "with_tokenizer"),
    [("model", "gae", True, True), ("gsm8k", "gae", False, True), ("model", "rloo", True, True),
     ("gsm8k", "rloo", False, False)],
)  # fmt: skip
def test_what_starts_from_the_critics_path(reward, advantage, with_model, with_tokenizer):
    names = names_of(reward=reward, advantage=advantage)
    assert (names.with_reward_model, names.with_critic_tokenizer) == (with_model, with_tokenizer)
    if not with_tokenizer:
        names_of("", reward, advantage=advantage)
        return
    wanted = (
        "^--critic_model_name_or_path expects .* name for the critic of --advantage gae, got nothing; give step 2's"
    )
    if with_model:
        wanted = r"^a reward is missing; give --reward, .*\(gsm8k, .*, as --critic_model_name_or_path"
        wanted += "; the critic of --advantage gae starts from the latter$" if advantage == "gae" else "$"
    with pytest.raises(ThreestepError, match=wanted):
        names_of("", reward, advantage=advantage)


def test_a_scale_without_the_reward_model():
    with pytest.raises(ThreestepError, match="--normalize_reward_scores needs the reward model's scores, and --reward"):
        names_of(reward="gsm8k", normalize_reward_scores=True)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "forwards",
            {"roles": {"actor_dropout": 0.1}},
            "reads and learns in one forward, and --actor_dropout 0.1 would",
        ),
        ("values", {"roles": {"critic_dropout": 0.3}}, "in one forward, and --critic_dropout 0.3 would change the"),
        ("forwards", {"roles": {"actor_zero_stage": 3}}, "ZeRO-3 has released, and --actor_zero_stage is 3; give"),
        (
            "values",
            {"advantage": "reinforce++"},
            "is about the critic, and --advantage .* has none",
        ),
        (
            "forwards",
            {"kl": {"kl_in": "loss", "kl_estimator": "full"}},
            "would keep all logits of a rollout for --kl_e",
        ),
    ],
)
def test_forwards_that_cannot_be_learned_from(name, given, said):
    with pytest.raises(ThreestepError, match=f"--reuse_{name} .*{said}"):
        names_of(**{f"reuse_{name}": True}, **given)
    names_of(**given)
    both = {"reuse_forwards": True, "reuse_values": True}
    names_of(**both, kl={"kl_estimator": "full"})
    names_of(**both, roles={"actor_dropout": None, "critic_dropout": None})  # the models themselves are asked


def test_names_that_nothing_has_are_told_together_with_near_ones():
    with pytest.raises(ThreestepError) as caught:
        names_of(rollout_engine="hff", checker="gsm8", advantage="gea", reward="modle")
    said = str(caught.value)
    assert said.startswith("4 mistakes in the configuration:") and "got 'modle'; did you mean 'model'" in said
    for part in ("--advantage expects one of gae, grpo", "got 'gea'; did you mean 'gae'", "'hff'", "'gsm8k'"):
        assert part in said


def test_ranks_wait_longer_than_a_reward_function_may_work():
    names_of()
    names_of(rank_timeout=301)
    with pytest.raises(
        ThreestepError, match="--reward_timeout 300 expects less than --rank_timeout 300, the seconds that ranks wait"
    ):
        names_of(rank_timeout=300)


@pytest.mark.parametrize("short", ["actor", "critic"])
def test_positions_are_compared_before_anything_loads(tmp_path, short):
    for name in ("actor", "critic"):
        tiny_config("llama", max_position_embeddings=64 if name == short else 128).save_pretrained(tmp_path / name)
    paths = {f"{name}_model_name_or_path": str(tmp_path / name) for name in ("actor", "critic")}
    flags = ppo_flags(**paths, max_prompt_seq_len=60, max_answer_seq_len=5)
    with pytest.raises(
        ThreestepError,
        match="--max_prompt_seq_len and --max_answer_seq_len together allow sequences of 65 tokens and the model "
        f"'{tmp_path / short}' has 64 positions",
    ):
        check_models(flags, with_critic=True)
    if short == "critic":
        check_models(flags, with_critic=False)
