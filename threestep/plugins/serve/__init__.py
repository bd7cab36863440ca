"""Finished models for programs: an endpoint in OpenAI's form, and a reward model over HTTP."""

from training.utils.plugins.plugin import Command, Plugin

PLUGIN = Plugin(
    "serve",
    "serves finished models over HTTP",
    needs=("evaluation", "ragged", "serving"),
    commands={
        "serve": Command(f"{__name__}.serve", "serve a model through the OpenAI API"),
        "serve reward": Command(f"{__name__}.serve_reward", "serve a reward model over HTTP", earlier="serve-reward"),
    },
)
