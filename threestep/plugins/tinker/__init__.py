"""A server for training loops of others, in the form of the Tinker API: `threestep serve training`."""

from training.utils.plugins.plugin import Command, Plugin

PLUGIN = Plugin(
    "tinker",
    "LoRA training served to external training loops through the Tinker API",
    needs=("evaluation", "lora", "ragged", "serve", "serving"),
    commands={
        "serve training": Command(__name__, "serve LoRA training through the Tinker API", earlier="serve-training")
    },
)
