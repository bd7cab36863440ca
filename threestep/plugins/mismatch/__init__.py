"""Losses corrected where rollout and training differ: weights of tokens, rejection, a bypass."""

from training.utils.plugins.plugin import Hooks, Plugin

PLUGIN = Plugin(
    "mismatch",
    "correction of the mismatch between rollout and training by weights and rejection",
    flags={"step3_ppo": (f"{__name__}.arguments:MismatchArguments",)},
    tables={
        "corrections": {"mismatch_correction": f"{__name__}.correction:correction"},
        "curves": {
            "mismatch": (
                "step3_ppo",
                "Mismatch of rollout and training",
                "difference of a token's probability between the two forwards",
                {"mean": "mismatch/probability_difference_mean", "greatest": "mismatch/probability_difference_max"},
            ),
        },
    },
    hooks=Hooks(check=f"{__name__}.checks:check"),
)
