"""Runs: what may be seen through them is what the dense mask shows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.utils.contracts.documents import TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import AttentionRun, RunSpan, runs_of
from training.utils.layout.rows import packed_rows


def tokens(length, is_target=False):
    return TokenSequence(torch.arange(length), torch.full((length,), is_target))


def shared(prompt, *responses):
    return shared_prompt(tokens(prompt), [tokens(length, True) for length in responses])


def test_a_shared_prompt_by_hand():
    # prompt of 4, responses of 2 and 3, another sequence of 5; the second row is a sequence of 6, padded to 14.
    rows = packed_rows([[shared(4, 2, 3), plain(tokens(5))], [plain(tokens(6))]], 0)
    assert runs_of(rows.segment_ids_NT, rows.segments.visible_NSS) == (
        AttentionRun(6, (), False),  # the prompt and the first response: causal as they stand
        AttentionRun(3, (RunSpan(0, 0, 4),), False),  # the second response sees the prompt and not the first response
        AttentionRun(5, (), False),
        AttentionRun(6, (), False),
        AttentionRun(8, (), True),
    )


def test_rows_of_one_document_have_no_lengths():
    rows = packed_rows([[plain(tokens(3))], [plain(tokens(5))]], 0)
    assert rows.lengths() is None and rows.to("meta").segments is None


def test_lengths_by_hand_are_made_where_the_rows_leave_the_host():
    rows = packed_rows([[shared(4, 2, 3), plain(tokens(5))], [plain(tokens(6))]], 0)
    lengths = rows.lengths()
    assert lengths.begins.tolist() == [0, 6, 9, 14, 20, 28]
    assert lengths.key_begins.tolist() == [0, 6, 13, 18, 24, 32]
    assert lengths.key_tokens.tolist() == [*range(6), 0, 1, 2, 3, *range(6, 28)]
    assert (lengths.longest, lengths.longest_keys) == (8, 8)
    assert rows.segments.run_lengths is None and rows.to("cpu").segments.run_lengths is None
    moved = rows.to("meta").segments.run_lengths
    assert {part.device.type for part in (moved.begins, moved.key_begins, moved.key_tokens)} == {"meta"}
    assert packed_rows([[plain(tokens(3)), plain(tokens(4))]], 0).lengths().key_tokens is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3), min_size=1, max_size=3
    )
)
def test_runs_show_what_the_mask_shows(lengths):
    """lengths: of each row's documents, the prompt's and its responses'."""
    rows = packed_rows(
        [[shared(*parts) if len(parts) > 1 else plain(tokens(parts[0])) for parts in row] for row in lengths], 0
    )
    if rows.segments is None:
        assert rows.dense_mask() is None
        return
    runs = runs_of(rows.segment_ids_NT, rows.segments.visible_NSS)
    total, starts = rows.input_ids_NT.numel(), []
    for index in range(len(runs)):
        starts.append(starts[-1] + runs[index - 1].tokens if starts else 0)
    seen = torch.zeros(total, total, dtype=torch.bool)
    for start, run in zip(starts, runs, strict=True):
        own = slice(start, start + run.tokens)
        seen[own, own] = torch.ones(run.tokens, run.tokens, dtype=torch.bool).tril()
        for piece in run.sees:
            seen[own, starts[piece.run] + piece.start : starts[piece.run] + piece.end] = True
    width = rows.input_ids_NT.shape[1]
    for n, mask_TT in enumerate(rows.dense_mask().squeeze(1)):
        here = slice(n * width, (n + 1) * width)
        assert torch.equal(seen[here, here], mask_TT)
        assert not seen[here].sum() - seen[here, here].sum()
