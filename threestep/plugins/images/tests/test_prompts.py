"""Positions of images in left-padded prompts, worked by hand."""

from __future__ import annotations

import torch

from threestep.plugins.images.prompts import left_padded_axes
from training.utils.contracts.documents import MediaSpan
from training.utils.contracts.token_rows import position_axes


def test_positions_of_left_padded_sequences():
    """Two tokens, 2 x 3 of an image, two tokens; and one token of text. Padding is at 0."""
    image = MediaSpan(2, 6, (2, 3), 0)
    mask_BP = torch.arange(10) >= torch.tensor([[0], [9]])
    axes_3BP = left_padded_axes(mask_BP, [(image,), ()])
    assert axes_3BP[:, 0].tolist() == position_axes(10, [image]).tolist()
    assert axes_3BP[:, 1].tolist() == [[0] * 10] * 3
    mask_BP = torch.arange(11) >= torch.tensor([[1], [9]])
    axes_3BP = left_padded_axes(mask_BP, [(image,), ()])
    assert axes_3BP[1].tolist() == [[0, 0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0] * 10 + [1]]
