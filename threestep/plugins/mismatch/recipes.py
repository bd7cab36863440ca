"""Correction of the mismatch between the policy that rolled out and the one that is trained. The room serves the
flags `--mismatch_*`, by the tables of their names. Cheap to import.

Responses are drawn from the rollout engine's policy and trained as if drawn from the trainer's. The two differ by
rounding, kernels, quantised or older weights. r = p_train / p_rollout of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CORRECTIONS = ("none", "truncate", "mask")
LEVELS = ("token", "sequence", "geometric")
REJECTED = ("stay", "leave")
SCOPES = ("token", "seq_sum", "seq_mean", "seq_max")
ESTIMATES = ("k1", "k2", "k3")
REJECTIONS = tuple(f"{scope}_{estimate}" for scope in SCOPES for estimate in ESTIMATES)


@dataclass(frozen=True)
class Recipe:
    """flags: its values of `--mismatch_NAME`; a flag on the command line wins. when: to use it, a clause."""

    when: str
    flags: Mapping[str, Any] = field(default_factory=dict)


_TOKEN = {"correction": "truncate", "level": "token"}
_SEQUENCE = {"correction": "truncate", "level": "sequence"}
_GEOMETRIC = {"rejection": ["seq_mean_k1:0.999:1.001"]}
_K3 = {"rejection": ["seq_mean_k3:0.01"]}
_BYPASS = {"correction": "none", "bypass": True}
# verl's names and bounds.
RECIPES = {
    "disabled": Recipe("the engine computes exactly what the trainer does", {"correction": "none"}),
    "decoupled_token_is": Recipe("you have no reason to choose another: low variance, small bias", _TOKEN),
    "decoupled_seq_is": Recipe("responses are short: unbiased up to the bound, but more variance", _SEQUENCE),
    "decoupled_token_icepop": Recipe(
        "a few tokens differ a lot, as with mixture-of-experts routers",
        {"correction": "mask", "level": "token", "threshold": 5.0, "threshold_lower": 0.5},
    ),
    "decoupled_geo_rs": Recipe(
        "responses are long, with rare but large differences", {"correction": "none", **_GEOMETRIC}
    ),
    "decoupled_geo_rs_token_tis": Recipe(
        "as for decoupled_geo_rs, but with small differences everywhere too", {**_TOKEN, **_GEOMETRIC}
    ),
    "decoupled_k3_rs": Recipe("as for decoupled_geo_rs, measured with a divergence", {"correction": "none", **_K3}),
    "decoupled_k3_rs_token_tis": Recipe(
        "as for decoupled_geo_rs_token_tis, measured with a divergence", {**_TOKEN, **_K3}
    ),
    "bypass_ppo_clip": Recipe(
        "you want to skip the old policy's forward pass: PPO's ratio is then relative to the rollout's policy", _BYPASS
    ),
    "bypass_ppo_clip_geo_rs": Recipe("as for bypass_ppo_clip, with long responses", {**_BYPASS, **_GEOMETRIC}),
    "bypass_ppo_clip_k3_rs": Recipe("as for bypass_ppo_clip_geo_rs, measured with a divergence", {**_BYPASS, **_K3}),
    "bypass_pg_is": Recipe("you train without a ratio or clipping (--policy_loss gpg)", {**_BYPASS, **_SEQUENCE}),
    "bypass_pg_geo_rs": Recipe(
        "as for bypass_pg_is, but responses are dropped instead of weighted", {**_BYPASS, **_GEOMETRIC}
    ),
    "bypass_pg_geo_rs_token_tis": Recipe(
        "as for bypass_pg_geo_rs, with weights too", {**_BYPASS, **_TOKEN, **_GEOMETRIC}
    ),
}
