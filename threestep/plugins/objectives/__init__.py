"""Losses and advantage estimators that the three steps can do without."""

from training.utils.plugins.plugin import Hooks, Plugin

PLUGIN = Plugin(
    "objectives",
    "additional policy losses, advantage estimators and preference losses",
    tables={
        "policy_losses": {
            "gspo": f"{__name__}.policy_losses:GSPO",
            "cispo": f"{__name__}.policy_losses:CISPO",
            "geo_mean": f"{__name__}.policy_losses:GEO_MEAN",
            "sapo": f"{__name__}.policy_losses:SAPO",
            "gpg": f"{__name__}.policy_losses:GPG",
            "kl_cov": f"{__name__}.policy_losses:KL_COV",
            "clip_cov": f"{__name__}.policy_losses:CLIP_COV",
        },
        "advantages": {
            "grpo_passk": f"{__name__}.estimators:GRPO_PASSK",
            "opo": f"{__name__}.estimators:OPO",
            "gpg": f"{__name__}.estimators:GPG",
            "optimal_token_baseline": f"{__name__}.estimators:TOKEN_BASELINE",
            "tir_optimal_token_baseline": f"{__name__}.estimators:TOKEN_BASELINE",
        },
        "preference_losses": {
            "sigmoid_norm": f"{__name__}.preference_losses:SIGMOID_NORM",
            "robust": f"{__name__}.preference_losses:ROBUST",
            "apo_zero": f"{__name__}.preference_losses:APO_ZERO",
            "apo_down": f"{__name__}.preference_losses:APO_DOWN",
            "plackett_luce": f"{__name__}.preference_losses:PLACKETT_LUCE",
            "orpo": f"{__name__}.preference_losses:ORPO",
            "simpo": f"{__name__}.preference_losses:SIMPO",
            "cpo": f"{__name__}.preference_losses:CPO",
            "kto": f"{__name__}.preference_losses:KTO",
            "bco": f"{__name__}.preference_losses:BCO",
        },
    },
    hooks=Hooks(check=f"{__name__}.checks:check"),
)
