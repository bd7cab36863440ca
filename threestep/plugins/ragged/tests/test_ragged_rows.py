"""Rows that are given several tokens at once read them in parts, without a mask of all by all."""

from __future__ import annotations

import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import shapes_of_inputs
from threestep.plugins.ragged import ragged_rows
from threestep.plugins.ragged.ragged_rows import RaggedRows


def test_turns_and_paths_read_a_row_in_parts_too(monkeypatch):
    model, generator = tiny_causal_lm("llama", torch.float64), torch.Generator().manual_seed(2)
    texts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in (40, 3, 17, 33)]
    found = []
    for numbers in (1 << 25, 400):  # 9 tokens of a row of 43
        monkeypatch.setattr(ragged_rows, "_MASK_NUMBERS", numbers)
        rows = RaggedRows(model)
        rows.add(len(texts))
        with torch.no_grad():
            rows.give(0, [[5, 6, 7], [8], [9, 10], [11]])
            logits, seen = shapes_of_inputs(model, lambda rows=rows: rows.give(0, texts))
            found.append((logits, rows.append([12, 13, 14, 15], rows.filled), seen))
        assert rows.filled == [44, 5, 20, 35]
    (whole, whole_next, one), (parts, parts_next, several) = found
    assert one == [(4, 40)] and max(width for _, width in several) == 9 and len(several) > 4
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(parts_next, whole_next, rtol=0, atol=1e-6)
