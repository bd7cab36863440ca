"""Where the entries of multi-token prediction stand."""

from __future__ import annotations

import torch

from tests.support.random_rows import random_rows
from threestep.plugins.mtp.layout.entries import mtp_entries, mtp_targets
from threestep.plugins.parallel_thinking.layout import parallel_document
from threestep.plugins.parallel_thinking.tests.parallel_texts import TAGS, Path, Text
from training.utils.contracts.documents import TokenSequence, join, plain, shared_prompt
from training.utils.layout.rows import packed_rows, padded_rows


def test_the_worked_example():
    rows = packed_rows([[plain(join(torch.tensor([5, 6]), torch.tensor([7, 8])))]], 0, with_before=True)
    one, two = mtp_entries(rows, 2)
    assert one.before_L.tolist() == [0, 0, 1, 2]
    assert one.has_entry_NT.tolist() == [[False, True, True, True]]
    assert (one.rows.target_ids_M.tolist(), one.rows.predictor_M.tolist()) == ([7, 8], [1, 2])
    assert two.has_entry_NT.tolist() == [[False, False, True, True]]
    assert (two.rows.target_ids_M.tolist(), two.rows.predictor_M.tolist()) == ([8], [2])
    # Nothing looks at slot 0, and it sees itself: a row of only False gives NaN in some kernels.
    assert one.rows.dense_mask()[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]


def test_a_response_begins_with_an_entry_on_the_prompts_last_state():
    """Prompt [1 2], responses [3 4] and [5]: slots 0 to 4. Slot 2 embeds 3 and takes slot 1, as slot 4 (token 5) does.
    Token 2 of the prompt predicts 3 and 5, and has an entry; so both are targets of depth 1, beside 4."""
    prompt = TokenSequence(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.bool))
    responses = [TokenSequence(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool)) for ids in ([3, 4], [5])]
    document = shared_prompt(prompt, responses)
    one, two = mtp_entries(packed_rows([[document]], 0, with_before=True), 2)
    assert one.before_L.tolist() == [0, 0, 1, 2, 1]
    assert one.rows.target_ids_M.tolist() == [3, 4, 5] and mtp_targets([document], 1) == 3
    assert two.rows.target_ids_M.tolist() == [4] and mtp_targets([document], 2) == 1  # 3 and 5 have two tokens before


def test_paths_go_on_from_the_opening_and_the_trunk_from_the_last_path():
    """Trunk of 3 with the opening tag, paths, trunk again: each path's first token takes the tag before all paths."""
    text = Text().trunk(*range(10, 13)).block(Path(range(20, 22)), Path(range(30, 33))).trunk(40, 41)
    document = parallel_document(text.sequence(), TAGS)
    rows = packed_rows([[document]], 0, with_before=True)
    (entries,) = mtp_entries(rows, 1)
    starts = [0]
    for segment in document.segments:
        starts.append(starts[-1] + len(segment.tokens))
    opening_end = starts[1] - 1
    assert [int(entries.before_L[starts[index]]) for index in (1, 2)] == [opening_end, opening_end]
    assert int(entries.before_L[starts[3]]) == starts[3] - 1
    assert int((~entries.has_entry_NT).sum()) == 1


def test_targets_are_counted_as_they_are_laid_out():
    generator = torch.Generator().manual_seed(4)
    for _ in range(30):
        lengths = torch.randint(1, 6, (4,), generator=generator).tolist()
        parts = [torch.randint(10, 60, (count,), generator=generator) for count in lengths]
        masks = [torch.rand(len(ids), generator=generator) < 0.6 for ids in parts]
        masks[0][0] = False
        prompt, *responses = (TokenSequence(ids, mask) for ids, mask in zip(parts, masks, strict=True))
        documents = [shared_prompt(prompt, responses), plain(prompt)]
        entries = mtp_entries(packed_rows([documents], 0, with_before=True), 3)
        for depth, entry in enumerate(entries, start=1):
            assert len(entry.rows.target_ids_M) == mtp_targets(documents, depth)


def test_who_sees_whom_stays_but_for_slots_without_an_entry():
    generator = torch.Generator().manual_seed(5)
    for _ in range(5):
        rows = random_rows(generator, 2, 6, with_before=True)
        for entry in mtp_entries(rows, 2):
            alone_NT = ~entry.has_entry_NT & (rows.segment_ids_NT != -1)
            before, after = rows.dense_mask()[:, 0], entry.rows.dense_mask()[:, 0]
            itself_TT = torch.eye(before.shape[1], dtype=torch.bool)
            touched = alone_NT.unsqueeze(1) | alone_NT.unsqueeze(2)
            assert torch.equal(after, torch.where(touched, itself_TT, before))
            held = rows.copies_NT()
            assert torch.equal(entry.rows.copies_NT()[~alone_NT], held[~alone_NT])


def test_rows_of_one_document_get_a_mask():
    rows = padded_rows([join(torch.tensor([5]), torch.tensor([6, 7])), join(torch.tensor([8]), torch.tensor([9]))], 0)
    assert rows.segments is None
    rows = packed_rows(
        [[plain(join(torch.tensor([5]), torch.tensor([6, 7])))], [plain(join(torch.tensor([8]), torch.tensor([9])))]],
        0,
        with_before=True,
    )
    (entry,) = mtp_entries(rows, 1)
    assert entry.rows.target_ids_M.tolist() == [7]  # 6 and 9 are predicted by a first token
    assert entry.rows.dense_mask()[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
