"""Padded, packed, shared and ranked rows: what stands where, who sees whom, what is predicted from which position."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.families.subjects import true_logprobs
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import Document, TokenSequence, join, plain, shared_prompt, unshared
from training.utils.contracts.token_rows import PAD_SEGMENT, TokenRows
from training.utils.layout.rows import RankedRows, beyond_shortest, packed_rows, padded_rows, planned_size, ranked_rows
from training.utils.models.flops import visible_pairs
from training.utils.models.token_model import PolicyModel

PAD, EOS = 0, 2


def sequence(ids: list[int], targets: Sequence[int] = ()) -> TokenSequence:
    is_target = torch.zeros(len(ids), dtype=torch.bool)
    is_target[list(targets)] = True
    return TokenSequence(torch.tensor(ids, dtype=torch.int64), is_target)


def random_sequences(lengths: list[int]) -> list[TokenSequence]:
    """Prompts of about a third, then responses that end with eos."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in lengths:
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        ids[-1] = EOS
        rows.append(join(ids[: length // 3], ids[length // 3 :]))
    return rows


def test_the_worked_example_of_the_record():
    rows = padded_rows([sequence([5, 6, 7], [2]), sequence([8, 9], [1])], pad_token_id=0)
    assert rows.input_ids_NT.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert rows.position_ids_NT.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert rows.segment_ids_NT.tolist() == [[0, 0, 0], [0, 0, PAD_SEGMENT]]
    assert rows.target_ids_M.tolist() == [7, 9]
    assert rows.predictor_M.tolist() == [1, 3]
    assert rows.sequence_M.tolist() == [0, 1]
    assert rows.end_B.tolist() == [2, 4]
    assert int((rows.segment_ids_NT >= 0).sum()) == 5
    assert rows.segments is None and rows.dense_mask() is None
    assert all(field.dtype == torch.int64 for name, field in vars(rows).items() if isinstance(field, torch.Tensor))


def test_a_target_has_a_token_before_it():
    joined = join(torch.tensor([5, 6]), torch.tensor([7, EOS]))
    assert (joined.input_ids.tolist(), joined.is_target.tolist()) == ([5, 6, 7, EOS], [False, False, True, True])
    for first in (sequence([5, 6], [0, 1]), join(torch.empty(0, dtype=torch.int64), torch.tensor([4, 5]))):
        with pytest.raises(AssertionError, match="the first token of a sequence has no predecessor"):
            padded_rows([first], 0)


def test_rows_move_whole():
    rows = padded_rows([sequence([5, 6, 7], [2])], 0).to("meta")
    assert isinstance(rows, TokenRows)
    assert all(field.device.type == "meta" for name, field in vars(rows).items() if isinstance(field, torch.Tensor))
    assert rows.segments is None
    packed = packed_rows([[plain(sequence([5, 6], [1])), plain(sequence([7, 8], [1]))]], 0).to("meta")
    assert packed.segments.run_lengths is not None and packed.segments.run_lengths.begins.device.type == "meta"
    tensors = [field for field in vars(packed).values() if isinstance(field, torch.Tensor)]
    tensors += [packed.segments.visible_NSS, packed.segments.copies_NS]
    assert all(field.device.type == "meta" for field in tensors)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3", "gemma3_text"])
def test_padded_rows_however_wide_have_the_models_own_log_probabilities(family):
    """Those of each sequence alone, by transformers. The forward is float64; a log-probability leaves our model as
    float32: relative steps of 6e-8."""
    model, sequences = tiny_causal_lm(family, torch.float64), random_sequences([19, 5, 12, 3])
    with torch.no_grad():
        for pad, width in ((PAD, 1), (PAD, 40), (EOS, 23)):
            ours_M = PolicyModel(model)(padded_rows(sequences, pad, min_width=width)).logprobs_M
            torch.testing.assert_close(ours_M.double(), true_logprobs(model, sequences), rtol=3e-7, atol=1e-7)


def test_the_weights_get_the_gradient_of_eos_where_pad_is_eos():
    """DeepSpeed-Chat's mask, ids != pad, leaves the end of every response out of the loss."""
    rows = padded_rows([join(torch.tensor([5, 6]), torch.tensor([7, EOS])), sequence([8, EOS], [1])], pad_token_id=EOS)
    assert rows.target_ids_M.tolist() == [7, EOS, EOS]  # no padding among them, every real eos there
    assert rows.end_B.tolist() == [3, 5] and int((rows.segment_ids_NT >= 0).sum()) == 6
    model = tiny_causal_lm("llama", torch.float64, tie_word_embeddings=False, pad_token_id=EOS)
    sequences = random_sequences([7, 4])
    gradients = []
    for pad in (EOS, PAD):
        model.zero_grad()
        PolicyModel(model)(padded_rows(sequences, pad, min_width=9)).logprobs_M.sum().backward()
        gradients.append(model.get_output_embeddings().weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-8)
    assert gradients[0][EOS].abs().max() > 0.1


def test_a_shared_prompt_beside_a_plain_document_by_hand():
    """Row 0: prompt [5 6], responses [7* 8*] and [9*]. Row 1: [4 3*], then two of padding."""
    pair = shared_prompt(sequence([5, 6]), [sequence([7, 8], [0, 1]), sequence([9], [0])])
    rows = packed_rows([[pair], [plain(sequence([4, 3], [1]))]], pad_token_id=1)
    assert rows.input_ids_NT.tolist() == [[5, 6, 7, 8, 9], [4, 3, 1, 1, 1]]
    assert rows.position_ids_NT.tolist() == [[0, 1, 2, 3, 2], [0, 1, 0, 0, 0]]
    assert rows.segment_ids_NT.tolist() == [[0, 0, 1, 1, 2], [0, 0, -1, -1, -1]]
    # 7 and 9 are both predicted by 6, at 1; 8 by 7, at 2; 3 by 4, at 1 * 5 + 0.
    assert rows.target_ids_M.tolist() == [7, 8, 9, 3]
    assert rows.predictor_M.tolist() == [1, 2, 1, 5]
    assert rows.sequence_M.tolist() == [0, 0, 1, 2]
    assert rows.end_B.tolist() == [3, 4, 6]
    assert int((rows.segment_ids_NT >= 0).sum()) == 7 and rows.before_NT is None  # not asked for
    numbers = [field for field in vars(rows).values() if isinstance(field, torch.Tensor)]
    assert all(field.dtype == torch.int64 for field in [*numbers, rows.segments.copies_NS])
    assert rows.segments.visible_NSS.dtype == torch.bool
    seen, other = rows.dense_mask()[:, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],  # the second response sees the prompt and itself, not the first
    ]
    assert other == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],  # padding sees padding, and no row of the mask is empty
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_padding_takes_no_position_that_a_model_may_lack():
    """Six responses of a prompt make a document longer than any sequence in it: the row beside it is padded to a width
    that may be above the model's positions."""
    wide = shared_prompt(sequence([5, 6]), [sequence([7, 8, 9], [0])] * 6)
    rows = packed_rows([[wide], [plain(sequence([4, 3], [1]))]], 0)
    assert rows.input_ids_NT.shape == (2, 20)
    assert int(rows.position_ids_NT.max()) == 4


def test_where_no_mask_is_needed_positions_count_on():
    """A position that starts again would read as a packed sequence to transformers."""
    rows = packed_rows([[plain(sequence([5, 6, 7], [1]))], [plain(sequence([8], []))]], 0)
    assert rows.segments is None and rows.dense_mask() is None
    assert rows.position_ids_NT.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("lay_out", [packed_rows, padded_rows])
def test_nothing_gives_a_row_of_padding_without_targets(lay_out):
    rows = lay_out([], pad_token_id=7)
    assert rows.input_ids_NT.tolist() == [[7]] and rows.segment_ids_NT.tolist() == [[PAD_SEGMENT]]
    assert rows.segments is None
    for name in ("target_ids_M", "predictor_M", "sequence_M", "end_B"):
        assert getattr(rows, name).shape == (0,) and getattr(rows, name).dtype == torch.int64


@st.composite
def documents(draw) -> Document:
    def drawn(least: int, may_start: bool) -> TokenSequence:
        ids = draw(st.lists(st.integers(1, 50), min_size=least, max_size=5))
        targets = [draw(st.booleans()) and (index > 0 or may_start) for index in range(len(ids))]
        return TokenSequence(torch.tensor(ids), torch.tensor(targets))

    responses = draw(st.integers(0, 4))
    if responses == 0:
        return plain(drawn(1, False))
    return shared_prompt(drawn(1, False), [drawn(1, True) for _ in range(responses)])


packings = st.lists(st.lists(documents(), min_size=1, max_size=3), min_size=1, max_size=3)


def places(row: list[Document]) -> list[tuple[int, int, int]]:
    """(document, segment, index in the segment) of every token of a row."""
    return [
        (place, index, column)
        for place, document in enumerate(row)
        for index, segment in enumerate(document.segments)
        for column in range(len(segment.tokens))
    ]


@settings(max_examples=60, deadline=None)
@given(packings)
def test_the_dense_mask_is_the_rule_of_who_sees_whom(packing):
    """Token by token: the same segment before me, or a segment that mine sees; padding sees padding before it."""
    rows = packed_rows(packing, 0)
    mask = rows.dense_mask()
    if mask is None:
        assert all(len(row) == 1 and len(row[0].segments) == 1 for row in packing)
        return
    width = rows.input_ids_NT.shape[1]
    assert mask.shape == (len(packing), 1, width, width) and mask.dtype == torch.bool
    for n, row in enumerate(packing):
        tokens = places(row)
        expected = torch.zeros(width, width, dtype=torch.bool)
        for here in range(width):
            for there in range(here + 1):
                if here >= len(tokens) or there >= len(tokens):
                    expected[here, there] = here >= len(tokens) and there >= len(tokens)
                    continue
                (document, segment, _), (other, other_segment, _) = tokens[here], tokens[there]
                sees = row[document].segments[segment].sees
                expected[here, there] = document == other and (segment == other_segment or other_segment in sees)
        assert torch.equal(mask[n, 0], expected)


@settings(max_examples=60, deadline=None)
@given(packings)
def test_every_sequence_is_found_again_in_the_rows(packing):
    """Read back from the rows by mask and positions alone, each sequence is what `unshared` makes of it."""
    rows = packed_rows(packing, 0)
    sequences = [alone.segments[0].tokens for row in packing for item in row for alone in unshared(item)]
    width = rows.input_ids_NT.shape[1]
    mask = rows.dense_mask()
    assert rows.end_B.numel() == len(sequences)
    for number, (end, sequence) in enumerate(zip(rows.end_B.tolist(), sequences, strict=True)):
        n, t = divmod(end, width)
        seen = torch.arange(t + 1) if mask is None else torch.nonzero(mask[n, 0, t]).flatten()
        assert rows.input_ids_NT[n, seen].tolist() == sequence.input_ids.tolist()
        assert rows.position_ids_NT[n, seen].tolist() == list(range(len(sequence)))
        own = rows.sequence_M == number
        assert rows.target_ids_M[own].tolist() == sequence.input_ids[sequence.is_target].tolist()
        # each target is predicted where the token before it stands
        before = [n * width + int(seen[column - 1]) for column in torch.nonzero(sequence.is_target).flatten().tolist()]
        assert rows.predictor_M[own].tolist() == before
    assert int((rows.segment_ids_NT >= 0).sum()) == sum(item.tokens for row in packing for item in row)
    assert rows.sequence_M.tolist() == sorted(rows.sequence_M.tolist())


@settings(max_examples=30, deadline=None)
@given(st.lists(documents(), min_size=1, max_size=4), st.integers(1, 30))
def test_one_sequence_a_row_is_padded_rows(items, min_width):
    alone = [sequence for item in items for sequence in unshared(item)]
    packed = packed_rows([[sequence] for sequence in alone], 0, min_width)
    padded = padded_rows([sequence.segments[0].tokens for sequence in alone], 0, min_width)
    assert isinstance(packed, TokenRows) and packed.segments is None
    for name, field in vars(padded).items():
        other = getattr(packed, name)
        assert torch.equal(field, other) if isinstance(field, torch.Tensor) else field == other, name


def test_how_often_a_token_stands_in_separate_sequences():
    """A prompt of two tokens with three responses, then a sequence, then padding; and padded rows."""

    def tokens(count: int) -> TokenSequence:
        return TokenSequence(torch.arange(count), torch.zeros(count, dtype=torch.bool))

    shared = shared_prompt(tokens(2), [tokens(1), tokens(2), tokens(1)])
    assert shared.copies == (3, 1, 1, 1)
    rows = packed_rows([[shared, plain(tokens(3))]], pad_token_id=0, min_width=11)
    assert rows.copies_NT().tolist() == [[3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 0]]
    assert packed_rows([[plain(tokens(2))], [plain(tokens(1))]], 0).copies_NT().tolist() == [[1, 1], [1, 0]]
    assert rows.without_targets().target_ids_M.numel() == 0


def test_a_mask_that_no_machine_holds_is_refused():
    rows = packed_rows([[plain(sequence([1] * 50_000)), plain(sequence([2] * 50_000))]], pad_token_id=0)
    with pytest.raises(
        ThreestepError, match=r"a mask of 100,000 x 100,000 tokens for 1 row takes 10 GB, but the limit is 9 GB"
    ):
        rows.dense_mask()


def row(prompt: list[int], *responses: list[int]) -> Document:
    return shared_prompt(sequence(prompt), [sequence(ids) for ids in responses])


PAIR = row([5, 6], [7, 2], [8, 9, 2])
THREE = row([4], [1], [2], [3])


def assert_pairs(batch: RankedRows) -> None:
    """1 beats 2; of the three, the first beats two and the second one."""
    assert list(zip(batch.better_Q.tolist(), batch.worse_Q.tolist(), strict=True)) == [(0, 1), (2, 3), (2, 4), (3, 4)]
    torch.testing.assert_close(batch.weight_Q, torch.tensor([1.0, 1 / 3, 1 / 3, 1 / 3]))


APART = [[5, 6, 7, 2, 0], [5, 6, 8, 9, 2], [4, 1, 0, 0, 0], [4, 2, 0, 0, 0], [4, 3, 0, 0, 0]]


@pytest.mark.parametrize(
    ("packing", "shared", "ids", "ends"),
    [
        ([[PAIR], [THREE]], False, APART, [3, 9, 11, 16, 21]),
        ([[PAIR, THREE]], False, APART, [3, 9, 11, 16, 21]),
        ([[PAIR, THREE]], True, [[5, 6, 7, 2, 8, 9, 2, 4, 1, 2, 3]], [3, 6, 8, 9, 10]),
        ([[PAIR], [THREE]], True, [[5, 6, 7, 2, 8, 9, 2], [4, 1, 2, 3, 0, 0, 0]], [3, 6, 8, 9, 10]),
    ],
)
def test_a_pair_and_three_ranked_responses(packing, shared, ids, ends):
    batch = ranked_rows(packing, shared, pad_token_id=0)
    assert batch.rows.input_ids_NT.tolist() == ids and batch.rows.end_B.tolist() == ends
    assert batch.rows.target_ids_M.numel() == 0
    assert_pairs(batch)
    after = ranked_rows([[THREE, PAIR]], shared, 0)
    assert list(zip(after.better_Q.tolist(), after.worse_Q.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2), (3, 4)]
    none = ranked_rows([], shared, 0)
    assert none.rows.input_ids_NT.shape == (1, 1)
    assert none.better_Q.shape == none.worse_Q.shape == none.weight_Q.shape == (0,)


@pytest.mark.parametrize("shared", [False, True])
def test_tokens_beyond_the_shortest_response(shared):
    """Of responses that are predicted: two and three tokens, then three, one and two."""

    def predicted(prompt: list[int], *responses: list[int]) -> Document:
        parts = [TokenSequence(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool)) for ids in responses]
        return shared_prompt(sequence(prompt), parts)

    batch = ranked_rows(
        [[predicted([5, 6], [7, 2], [8, 9, 2]), predicted([4], [1, 2, 3], [2], [3, 9])]], shared, pad_token_id=0
    )
    beyond_M, sequence_M = beyond_shortest(batch), batch.rows.sequence_M
    of_sequences = [beyond_M[sequence_M == number].tolist() for number in range(5)]
    assert of_sequences == [[False, False], [False, False, True], [False, True, True], [False], [False, True]]
    none = beyond_shortest(ranked_rows([], shared, 0))
    assert none.dtype == torch.bool and none.numel() == 0


@pytest.mark.parametrize(
    "responses", [([1] * 5, [2] * 90), ([1] * 90, [2] * 5), ([1], [2], [3] * 40)], ids=["long", "short", "three"]
)
def test_the_planner_bounds_what_is_computed_padding_included(responses):
    one, lengths = row([5] * 10, *responses), [len(ids) for ids in responses]
    for shared in (False, True):
        rows = ranked_rows([[one]], shared, 0).rows
        assert planned_size(10, lengths, shared).tokens == rows.input_ids_NT.numel()
        assert not shared or planned_size(10, lengths, True).pairs == visible_pairs(one)
        alone = [one] if shared else unshared(one)
        assert sum(document.tokens for document in alone) == int((rows.segment_ids_NT >= 0).sum())
