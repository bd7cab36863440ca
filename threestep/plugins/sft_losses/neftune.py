"""NEFTune: uniform noise on the input embeddings in training (Jain et al. 2023, arXiv:2310.05914, algorithm 1).

The noise of a sequence comes from its seed and is scaled by its length, so that it is the same however
sequences are laid out in rows, micro-batches and ranks. (The paper's code, and TRL's, scale by the padded length.)

N rows, T tokens in a row, B sequences, L tokens of one sequence, E width of the embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows


def embedding_noise(rows: TokenRows, seeds_B: Sequence[int], alpha: float, width: int) -> torch.Tensor:
    """Return float32 [N, T, E], uniform in [-1, 1] x alpha / sqrt(L E) on each sequence's tokens, 0 on padding.

    rows: of documents of one sequence. seeds_B: one for each sequence, in the order of `rows`. width: E. Numbers are
    drawn on the rows' device: those of a CPU and of a GPU differ.
    """
    noise_NTE = torch.zeros(*rows.input_ids_NT.shape, width, device=rows.input_ids_NT.device)
    noise_FE = noise_NTE.view(-1, width)  # flat positions, as in end_B
    generator = torch.Generator(noise_NTE.device)
    row_tokens, start = rows.input_ids_NT.shape[1], 0
    for end, seed in zip(rows.end_B.tolist(), seeds_B, strict=True):
        start = max(start, end // row_tokens * row_tokens)  # behind the sequence before it, or where its row begins
        length = end + 1 - start
        generator.manual_seed(seed)
        part_LE = noise_FE[start : end + 1]
        part_LE.uniform_(-1.0, 1.0, generator=generator).mul_(alpha / math.sqrt(length * width))
        start = end + 1
    return noise_NTE
