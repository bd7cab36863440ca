"""Losses of the policy, in float64, a file each, and the table of their names."""

from __future__ import annotations

from threestep.plugins.audit.references.policies import cispo, clipped, covariance, geo_mean, gpg, gspo, sapo

# Each takes `tokens.Tokens` and `tokens.Bounds` and returns [T].
LOSSES = {
    "ppo": clipped.ppo,
    "gspo": gspo.gspo,
    "cispo": cispo.cispo,
    "geo_mean": geo_mean.geo_mean,
    "sapo": sapo.sapo,
    "gpg": gpg.gpg,
    "kl_cov": covariance.kl_cov,
    "clip_cov": covariance.clip_cov,
}
