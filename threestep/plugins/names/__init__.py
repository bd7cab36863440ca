"""Flags of other programs (DeepSpeed-Chat, transformers, TRL) and their counterparts here, as tables."""

from threestep.plugins.names.meant_flags import MEANT
from threestep.plugins.names.reward_arguments import REWARD_ARGUMENTS
from training.utils.plugins.plugin import OtherNames, Plugin

_TABLES = f"{__name__}.deepspeed_chat_flags"

PLUGIN = Plugin(
    "names",
    "accepts the flags of DeepSpeed-Chat, transformers and TRL",
    other_names=OtherNames(
        flags={
            "step1_sft": f"{_TABLES}:SFT_OLD_FLAGS",
            "step2_reward": f"{_TABLES}:REWARD_OLD_FLAGS",
            "step2_dpo": f"{_TABLES}:DPO_OLD_FLAGS",
            "step3_ppo": f"{_TABLES}:PPO_OLD_FLAGS",
            "reward-evaluate": f"{_TABLES}:SCORING_OLD_FLAGS",
            "evaluate": f"{_TABLES}:ANSWERING_OLD_FLAGS",
        },
        reads=f"{_TABLES}:read_flags",
        launcher=f"{__name__}.launcher_flags:read_launcher_flags",
        run=f"{__name__}.e2e_flags",
    ),
    tables={"meant_flags": MEANT, "reward_arguments": REWARD_ARGUMENTS},
)
