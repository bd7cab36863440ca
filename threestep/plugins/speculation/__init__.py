"""Rollouts by guesses: several tokens ahead, verified in one forward, with the same responses."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin(
    "speculation",
    "guesses tokens ahead and verifies them together while generating responses",
    flags={"step3_ppo": (f"{__name__}.arguments:SpeculationArguments",)},
    tables={
        "decode_loops": {"speculate": f"{__name__}.loop:asked_speculation"},
        "kept_as_begun": {"speculate_by": None},
    },
)
