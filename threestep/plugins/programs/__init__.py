"""Programs beside the steps: all of them from one file, models of checkpoints, new models."""

from training.utils.plugins.plugin import HANDED_ON, Command, Plugin

PLUGIN = Plugin(
    "programs",
    "all steps from one file, exported models, new models",
    commands={
        "all": Command(f"{__name__}.all_steps", "run several steps from one YAML file", HANDED_ON),
        "export": Command(f"{__name__}.export", "make a model folder from a checkpoint"),
        "new-model": Command(f"{__name__}.new_model", "make a small model with random weights, and its tokenizer"),
    },
)
