"""Entries of the table of policy losses, and the flags that each loss alone has. Cheap to import: `--help` reaches this
module."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.base.user_files import imported
from training.utils.flags.flags import flag
from training.utils.plugins.objectives import PolicyLoss

_CLIPS = ("clip_range", "clip_range_low", "clip_range_high", "dual_clip")


@dataclass
class SapoArguments:
    """Flags of `sapo`."""

    sapo_tau_pos: float = flag(
        1.0, "sapo: how fast the gate closes for tokens with a positive advantage.", "temperature > 0"
    )
    sapo_tau_neg: float = flag(
        1.05, "sapo: how fast the gate closes for tokens with a negative advantage.", "temperature > 0"
    )


@dataclass
class CovarianceArguments:
    """Flags of both losses that hold tokens back by their covariance."""

    cov_share: float = flag(2e-4, "kl_cov and clip_cov: fraction of tokens to hold back.", "0 < share < 1")


@dataclass
class KlCovArguments(CovarianceArguments):
    """Flags of `kl_cov`."""

    kl_cov_coef: float = flag(1.0, "kl_cov: weight of the penalty on the held-back tokens.", "factor >= 0")


@dataclass
class ClipCovArguments(CovarianceArguments):
    """Flags of `clip_cov`."""

    clip_cov_low: float = flag(1.0, "clip_cov: lowest covariance at which a token may be held back.", "covariance")
    clip_cov_high: float = flag(5.0, "clip_cov: highest covariance at which a token may be held back.", "covariance")


GSPO = PolicyLoss(
    imported("threestep.plugins.objectives.ratios:gspo"), "seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4
)
# Weights from 0 to 5.
CISPO = PolicyLoss(imported("threestep.plugins.objectives.ratios:cispo"), clip_low=1.0, clip_high=4.0)
GEO_MEAN = PolicyLoss(
    imported("threestep.plugins.objectives.ratios:geo_mean"),
    "seq-mean-token-mean",
    clip_low=0.4,
    clip_high=0.4,
    unread=("dual_clip",),
)
SAPO = PolicyLoss(
    imported("threestep.plugins.objectives.ratios:sapo"), "seq-mean-token-mean", unread=_CLIPS, flags=SapoArguments
)
GPG = PolicyLoss(imported("threestep.plugins.objectives.ratios:gpg"), has_ratio=False)
KL_COV = PolicyLoss(
    imported("threestep.plugins.objectives.covariance:kl_cov"),
    flags=KlCovArguments,
    selects=imported("threestep.plugins.objectives.covariance:most_covariant"),
)
CLIP_COV = PolicyLoss(
    imported("threestep.plugins.objectives.covariance:clip_cov"),
    flags=ClipCovArguments,
    selects=imported("threestep.plugins.objectives.covariance:drawn_between"),
)
