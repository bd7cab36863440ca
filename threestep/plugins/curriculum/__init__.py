"""A choice of step 3's prompts by the scores of earlier rollouts, and prompts that are made meanwhile."""

from training.utils.plugins.plugin import Plugin

_PLACE = f"{__name__}.opening:open_prompts"

PLUGIN = Plugin(
    "curriculum",
    "prompts of step 3 chosen, or made, by the scores of earlier rollouts",
    flags={"step3_ppo": (f"{__name__}.arguments:CurriculumArguments",)},
    tables={"prompt_sources": {"prompt_sampler": _PLACE, "prompt_dataset": _PLACE}},
)
