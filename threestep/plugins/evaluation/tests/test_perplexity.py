"""Losses in the token layout are those of one sequence after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from threestep.plugins.evaluation.perplexity import row_losses
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import SentenceRow
from training.utils.data.rows.documents import sentence_document


def test_row_losses_beside_plain_cross_entropy(asked):
    draws = np.random.default_rng(0)
    rows = []
    for place, length in enumerate((5, 9, 30, 7)):
        mask = np.arange(length) >= 2
        rows.append(SentenceRow(place, draws.integers(0, 60, length).astype(np.int32), mask))
    losses, targets, right = row_losses(asked, [sentence_document(row) for row in rows], 32, 2, flag="--max_seq_len")
    assert targets == [3, 7, 28, 5]
    hits = 0
    for row, loss in zip(rows, losses, strict=True):
        ids = torch.tensor(row.input_ids, dtype=torch.int64)
        with torch.no_grad():
            logits = asked.model(ids[None]).logits[0, :-1].double()
        expected = torch.nn.functional.cross_entropy(logits[1:], ids[2:], reduction="sum")
        assert loss == pytest.approx(float(expected), rel=1e-5)
        hits += int((logits[1:].argmax(-1) == ids[2:]).sum())
    assert right == hits / 43
    with pytest.raises(ThreestepError, match="--max_seq_len allow sequences of 129 tokens"):
        row_losses(asked, [], 129, 2, flag="--max_seq_len")
