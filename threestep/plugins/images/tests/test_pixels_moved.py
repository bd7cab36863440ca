"""Rows move to a device with the pixels of their images."""

from __future__ import annotations

import torch

from tests.support.vision_models import with_pixels
from threestep.plugins.images.pixels import ImagePixels
from training.utils.contracts.documents import MediaSpan, TokenSequence, plain
from training.utils.layout.rows import packed_rows


def run(length, *images, is_target=False):
    return TokenSequence(torch.arange(length), torch.full((length,), is_target), images)


def image(begin, height, width, key=0):
    return MediaSpan(begin, height * width, (height, width), key)


def test_rows_move_with_their_pixels():
    rows = packed_rows([[plain(run(5, image(1, 1, 2)))]], 0)
    pixels = ImagePixels(torch.zeros(8, 4), torch.tensor([[1, 2, 4]]))
    moved = with_pixels(rows, pixels).to("meta")
    assert moved.media.read.values.is_meta and moved.media.read.grids_I3.is_meta and moved.media.axes_3NT.is_meta
    assert moved.media.spans == rows.media.spans
