"""Losses of pairs of responses and of marked ones, in float64, a file each, and the table of their names."""

from __future__ import annotations

from threestep.plugins.audit.references.preferences import (
    apo,
    cpo,
    hinge,
    ipo,
    likelihood,
    marked,
    orpo,
    plackett_luce,
    sigmoid,
    simpo,
)
from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term

__all__ = ["LOSSES", "MARKED", "ResponseSums", "Term"]

# Each takes `ResponseSums` and a `Term` and returns [P], or [S] of marked responses.
LOSSES = {
    "sigmoid": sigmoid.dpo,
    "sigmoid_norm": sigmoid.normalised,
    "robust": sigmoid.robust,
    "ipo": ipo.ipo,
    "hinge": hinge.hinge,
    "apo_zero": apo.zero,
    "apo_down": apo.down,
    "simpo": simpo.simpo,
    "cpo": cpo.cpo,
    "orpo": orpo.orpo,
    "sft": likelihood.sft,
    "plackett_luce": plackett_luce.ranking,
    "kto": marked.kto,
    "bco": marked.bco,
}
MARKED = ("kto", "bco")
