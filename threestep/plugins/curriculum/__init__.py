"""A choice of step 3's prompts by the scores of earlier rollouts, and prompts that are made meanwhile."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin(
    "curriculum",
    "choosing or generating the prompts of step 3 by the scores of earlier rollouts",
    flags={"step3_ppo": (f"{__name__}.arguments:CurriculumArguments",)},
    tables={"prompt_sources": dict.fromkeys(("prompt_sampler", "prompt_dataset"), f"{__name__}.opening:open_prompts")},
)
