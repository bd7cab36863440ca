"""Noise on the embeddings of paths."""

from __future__ import annotations

import torch

from threestep.plugins.parallel_thinking.layout import parallel_document
from threestep.plugins.parallel_thinking.tests.parallel_texts import TAGS, Path, Text
from threestep.plugins.sft_losses.neftune import embedding_noise
from threestep.plugins.sft_losses.tests.test_neftune import PAD, document
from training.utils.layout.rows import packed_rows


def test_parallel_paths_are_one_sequence():
    """Whose last position is not its length - 1: all its tokens have noise, by their number."""
    text = Text().trunk(10, 11).block(Path([12, 13]), Path([14])).trunk(15)
    paths = parallel_document(text.sequence(), TAGS)
    noise_NTE = embedding_noise(packed_rows([[document(3), paths], [document(5)]], PAD), [1, 2, 3], 5.0, 6)
    of_the_same_length = embedding_noise(packed_rows([[document(12)]], PAD), [2], 5.0, 6)[0]
    assert torch.equal(noise_NTE[0, 3:], of_the_same_length)
    assert noise_NTE[1, :5].all() and not noise_NTE[1, 5:].any()
