"""What --share_trunk lacks, and what it does not go together with, is told before a model loads."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.lora.checks import check
from training.step3_ppo.flags.checks import checked_components
from training.utils.base.errors import Mistakes, ThreestepError

LORA = {"actor_lora_dim": 4, "critic_lora_dim": 2}


def mistakes_of(**given) -> list[str]:
    mistakes = Mistakes()
    check(ppo_flags(actor_model_name_or_path="a", share_trunk=True, **given), mistakes)
    return mistakes.sentences


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        (LORA, []),
        ({**LORA, "actor_zero_stage": 2, "critic_zero_stage": 1, "offload": True}, []),
        ({**LORA, "actor_zero_stage": 3, "critic_zero_stage": 3}, []),
        (
            {**LORA, "critic_zero_stage": 3},
            [
                "--share_trunk: ZeRO 3 shards the trunk for both, and --actor_zero_stage is 0, --critic_zero_stage 3; "
                "give 3 to both or to neither"
            ],
        ),
        (
            {"actor_lora_dim": 4},
            [
                "--share_trunk trains adapters of actor and critic on one frozen trunk, and --critic_lora_dim is 0; "
                "give it 1 or more"
            ],
        ),
        (
            {"critic_lora_dim": 4},
            [
                "--share_trunk trains adapters of actor and critic on one frozen trunk, and --actor_lora_dim is 0; "
                "give it 1 or more"
            ],
        ),
        (
            {**LORA, "only_optimize_lora": False},
            ["--share_trunk keeps the trunk frozen, and --only_optimize_lora false trains it; leave out one of them"],
        ),
        (
            {**LORA, "use_dora": True},
            [
                "--share_trunk lends the trunk's weights to two models, and --use_dora takes their norms in each; that "
                "was never compared with two models of their own; leave out one of them"
            ],
        ),
    ],
)
def test_mistakes(given, sentences):
    assert mistakes_of(**given) == sentences


def names_of(critic: str, reward: str, advantage: str = "gae"):
    paths = {"actor_model_name_or_path": "a", "critic_model_name_or_path": critic}
    flags = ppo_flags(**paths, **LORA, share_trunk=True, num_samples_per_prompt=2, advantage=advantage, reward=reward)
    return checked_components(flags)


def test_the_critics_path_is_the_reward_models_alone():
    assert not names_of("", "gsm8k").with_critic_tokenizer
    assert names_of("c", "model").with_critic_tokenizer
    with pytest.raises(ThreestepError, match="^a reward is missing; .* as --critic_model_name_or_path$"):
        names_of("", "model")


def test_an_advantage_without_a_critic():
    with pytest.raises(
        ThreestepError,
        match="--share_trunk puts actor and critic on one trunk, and --advantage rloo has no critic; leave it out",
    ):
        names_of("c", "model", "rloo")
