"""Rows whose last tokens are taken back compute what rows without these tokens do."""

from __future__ import annotations

import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from tests.unit.utils.generation.decoding.test_decoding import PADDED
from tests.unit.utils.generation.decoding.test_hf import prompts
from threestep.plugins.speculation.kept_rows import KeptRows
from training.utils.generation.decoding.cache import moves_when_leaving


def test_what_is_taken_back_leaves_no_trace():
    model, generator = tiny_causal_lm("llama"), torch.Generator().manual_seed(5)
    ids_BP = torch.randint(3, VOCABULARY, (3, 4), generator=generator)
    mask_BP = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    rows = KeptRows(model.base_model, mask_BP, 40)
    held = [ids_P[mask_P].tolist() for ids_P, mask_P in zip(ids_BP, mask_BP, strict=True)]
    with torch.no_grad():
        rows.prefill((mask_BP.long().cumsum(-1) - 1).clamp(min=0), input_ids=ids_BP)
        for kept in ([1, 3, 2], [1, 1, 1], [2, 3, 1], [3, 2, 2]):
            given_AQ = torch.randint(3, VOCABULARY, (len(held), 3), generator=generator)
            states_AQH = rows.give(3, input_ids=given_AQ)
            kept = kept[: len(held)]
            rows.keep(torch.tensor(kept), max(kept))
            for row, (count, ids) in enumerate(zip(kept, given_AQ.tolist(), strict=True)):
                alone_QH = model.base_model(input_ids=torch.tensor([[*held[row], *ids]]))[0][0, -3:]
                torch.testing.assert_close(states_AQH[row], alone_QH, rtol=0, atol=1e-4)
                held[row] += ids[:count]
            if len(held) == 3:
                rows.leave(moves_when_leaving([True, False, False], torch.device("cpu")))
                held = [held[2], held[1]]
        before = rows.give(1, input_ids=torch.tensor([[7], [8]]))
        rows.keep_all()
        rows.take_back(1)
        torch.testing.assert_close(rows.give(1, input_ids=torch.tensor([[7], [8]])), before)
    # Columns that no row kept are cut off: 4 + 3 + 1 + 3 + 3, and the last.
    assert rows._cache.layers[0].keys.shape[2] == 15


def test_the_rows_of_guesses_read_prompts_in_parts_too():
    model, (ids_BP, mask_BP) = tiny_causal_lm("llama", torch.float64), prompts(PADDED)
    positions_BP = (mask_BP.long().cumsum(-1) - 1).clamp(min=0)
    found = []
    for part in (None, 6):
        rows = KeptRows(model.base_model, mask_BP, 40, prefill_tokens=part)
        with torch.no_grad():
            states_BPH = rows.prefill(positions_BP, input_ids=ids_BP)
            found.append((states_BPH[mask_BP], rows.give(2, input_ids=ids_BP[:, -2:])))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)
