"""The tokens that carry loss. T tokens of all sequences one after the other."""

from __future__ import annotations

import numpy as np


def loss_mask(data_T: np.ndarray, real_T: np.ndarray, first_T: np.ndarray) -> np.ndarray:
    """Return bool [T], True on real tokens that the data want predicted, but for a sequence's first, which nothing
    predicts: the i of y_i in the sum of log p(y_i | x, y_<i) (Ouyang et al. 2022, section 3.5, "supervised").

    Worked example, two prompt tokens, two of a response, one of padding: data FFTTF, real TTTTF give FFTTF.
    """
    return data_T & real_T & ~first_T


def shifted(mask_T: np.ndarray, by: int, sequence_T: np.ndarray) -> np.ndarray:
    """Return values moved `by` tokens to the right within each sequence; 0 comes in."""
    moved = np.zeros_like(mask_T)
    if by > 0:
        same = sequence_T[by:] == sequence_T[:-by]
        moved[by:][same] = mask_T[:-by][same]
    else:
        same = sequence_T[-by:] == sequence_T[:by]
        moved[:by][same] = mask_T[-by:][same]
    return moved


def run_ends(mask_T: np.ndarray, sequence_T: np.ndarray) -> np.ndarray:
    """Return bool [T], True on the last token of each run of True, which is a response's end token."""
    return mask_T & ~shifted(mask_T, -1, sequence_T)


def run_begins(mask_T: np.ndarray, sequence_T: np.ndarray) -> np.ndarray:
    """Return bool [T], True on the first token of each run of True."""
    return mask_T & ~shifted(mask_T, 1, sequence_T)
