"""The loss of a whole ranking, by Plackett and Luce's model of rankings. P pairs, S sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term


def ranking(responses: ResponseSums, term: Term) -> np.ndarray:
    """log(1 + the sum over worse j of exp(beta (r_j - r_k))) of each response k but the last (Rafailov et al. 2023,
    appendix A.3), shared out over the pairs in which k is the better one. Of two responses it is DPO.

    Worked example, beta r of 0.2, 0.1, 0: log(1 + exp(-0.1) + exp(-0.2)) = 1.001943 and log(1 + exp(-0.1)) = 0.644397.
    """
    gap_P = -term.beta * responses.gap(responses.ratios_S)
    sums_S = np.zeros(len(responses.sums_S))  # log 1
    np.logaddexp.at(sums_S, responses.chosen_P, gap_P)
    return responses.shared(sums_S)
