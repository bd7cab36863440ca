"""A DeepSpeed configuration of the user's own, as JSON."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin(
    "deepspeed_json",
    "a DeepSpeed configuration of your own, checked key by key and completed by the flags",
    flags=dict.fromkeys(("step1_sft", "step2_reward", "step2_dpo"), (f"{__name__}.arguments:DeepSpeedJsonArguments",)),
    tables={"engine_configs": {"deepspeed_config": f"{__name__}.users_json:UsersJson"}},
)
