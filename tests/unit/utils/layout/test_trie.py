"""Sequences with equal beginnings, and equal experts, share them, and each is still what it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.support.tries import forked_sequences
from training.utils.contracts.documents import (
    Document,
    MediaSpan,
    TokenSequence,
    first_alike,
    join,
    plain,
    shared_prompt,
    together,
    unshared,
)
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.planner import PlanSettings
from training.utils.layout.rows import packed_rows
from training.utils.layout.trie import (
    NEVER,
    SequenceLayout,
    joined,
    prompt_groups,
    rank_share,
    trie_document,
    trie_size,
)
from training.utils.models.flops import visible_pairs


def sequence(text: str, images: tuple[MediaSpan, ...] = ()) -> TokenSequence:
    """Capitals are targets."""
    ids = torch.tensor([ord(letter.lower()) for letter in text])
    return TokenSequence(ids, torch.tensor([letter.isupper() for letter in text]), images)


def texts(document: Document) -> list[str]:
    return ["".join(map(chr, segment.tokens.input_ids.tolist())) for segment in document.segments]


def same(one: TokenRows, other: TokenRows) -> None:
    for name, field in [*vars(one).items(), *vars(one.segments).items()]:
        if name == "segments":
            continue
        other_field = getattr(other if name in vars(other) else other.segments, name)
        equal = torch.equal(field, other_field) if isinstance(field, torch.Tensor) else field == other_field
        assert equal, name


def test_three_samples_by_hand():
    """The worked example of `layout.trie`."""
    document = trie_document([sequence("pqABoC"), sequence("pqABoDE"), sequence("pqF")], least_tokens=3)
    assert texts(document) == ["pq", "abo", "c", "de", "f"]
    assert [part.sees for part in document.segments] == [(), (0,), (0, 1), (0, 1), (0,)]
    assert [part.first_position for part in document.segments] == [0, 2, 5, 5, 2]
    assert [part.predecessor for part in document.segments] == [None, 0, 1, 1, 0]
    assert document.owners == ((), (0, 1), (0,), (1,), (2,)) and document.ends == (2, 3, 4)
    assert document.copies == (3, 2, 1, 1, 1)
    assert (document.tokens, document.targets, document.reads) == (9, 8, 6)
    rows = packed_rows([[document]], 0)
    assert "".join(map(chr, rows.target_ids_M.tolist())) == "abcabdef"
    assert rows.sequence_M.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert rows.predictor_M.tolist() == [1, 2, 4, 1, 2, 4, 6, 1]
    assert rows.end_B.tolist() == [5, 7, 8]
    ids = [ord(each) for each in "abcdef"]
    assert [part.tolist() for part in rows.reads()] == [ids, [1, 2, 4, 4, 6, 1], [0, 1, 2, 0, 1, 3, 4, 5]]
    assert rows.without_targets().reads()[0].numel() == 0


@pytest.mark.parametrize("least, expected", [(3, ["pqabo", "c", "d"]), (4, ["pq", "aboc", "abod"])])
def test_beyond_the_prompt_it_has_to_pay(least, expected):
    assert texts(trie_document([sequence("pqABoC"), sequence("pqABoD")], least)) == expected


def test_a_response_is_trained_once_where_a_fork_holds_it_as_a_prompt():
    """The fork's earlier turn is no target of its own: the segment is cut where the owners change."""
    document = trie_document([sequence("pABoCDx"), sequence("pabocD"), sequence("pabocdeF")], least_tokens=1)
    assert texts(document) == ["paboc", "d", "x", "e", "f"] or texts(document) == ["paboc", "d", "x", "ef"]
    owners = dict(zip(texts(document), document.owners, strict=True))
    assert owners["paboc"] == (0,) and owners["d"] == (0, 1)
    assert document.targets == 3 + 1 + 1 + 1 and document.reads == 5
    assert document.ends[1] == texts(document).index("d")  # a sequence that ends where another goes on


def test_equal_sequences_are_one_with_two_owners():
    document = trie_document([sequence("pAB"), sequence("pAB")], least_tokens=1)
    assert (texts(document), document.ends, document.owners) == (["pab"], (0, 0), ((0, 1),))
    rows = packed_rows([[document]], 0)
    assert rows.end_B.tolist() == [2, 2] and rows.sequence_M.tolist() == [0, 0, 1, 1]
    assert rows.copies_NT().tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("least", [1, 4, NEVER])
def test_random_tries_hold_each_sequence_as_it_was(least):
    """Read back by `unshared`, and from the rows by mask and positions alone: tokens, targets, who predicts them, how
    often a token counts."""
    shared = 0
    for seed in range(25):
        sequences = forked_sequences(seed)
        sequences = (
            [sequences[index] for index in prompt_groups(sequences, least, NEVER)[0]] if least == NEVER else sequences
        )
        document = trie_document(sequences, least)
        assert document.tokens == trie_size(sequences, least).tokens <= sum(map(len, sequences))
        assert trie_size(sequences, least).pairs == visible_pairs(document)
        shared += sum(map(len, sequences)) - document.tokens
        assert document.targets == sum(int(each.is_target.sum()) for each in sequences)
        for alone, each in zip(unshared(document), sequences, strict=True):
            (only,) = alone.segments
            assert torch.equal(only.tokens.input_ids, each.input_ids)
            assert torch.equal(only.tokens.is_target, each.is_target)
        check_read_back(document, sequences)
    assert shared > 100


def check_read_back(document: Document, sequences: Sequence[TokenSequence]) -> None:
    first = plain(sequence("xyZ"))  # before it in the row: flat positions are not those of the document
    rows = packed_rows([[first, document]], 0, with_before=True)
    mask = rows.dense_mask()
    assert mask is not None and rows.before_NT is not None
    held = torch.zeros_like(rows.input_ids_NT[0])
    for number, (end, each) in enumerate(zip(rows.end_B[1:].tolist(), sequences, strict=True), start=1):
        seen = torch.nonzero(mask[0, 0, end]).flatten()
        held[seen] += 1
        assert torch.equal(rows.input_ids_NT[0, seen], each.input_ids)
        assert rows.position_ids_NT[0, seen].tolist() == list(range(len(each)))
        assert torch.equal(rows.before_NT[0, seen[1:]], seen[:-1])
        own = rows.sequence_M == number
        columns = torch.nonzero(each.is_target).flatten()
        assert torch.equal(rows.target_ids_M[own], each.input_ids[columns])
        assert torch.equal(rows.predictor_M[own], seen[columns - 1])
    held[:3] += 1
    assert torch.equal(rows.copies_NT()[0], held)
    assert rows.sequence_M.tolist() == sorted(rows.sequence_M.tolist())
    ids_U, predictor_U, read_M = rows.reads()
    assert len(ids_U) == document.reads + 1
    if read_M is not None:
        assert torch.equal(ids_U[read_M], rows.target_ids_M)
        assert torch.equal(predictor_U[read_M], rows.predictor_M)


def samples(prompts: int, each: int, response: int = 40) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(1, 64, (5 + 3 * prompt,), generator=generator) for prompt in range(prompts)]
    return [
        join(drawn[index // each], torch.randint(1, 64, (response,), generator=generator))
        for index in range(prompts * each)
    ]


def test_samples_of_a_prompt_are_what_they_were():
    """Responses that begin differently, or alike for fewer tokens than pay: `shared_prompt`, to the bit."""
    drawn = samples(prompts=1, each=4)
    for each in drawn[1:3]:  # a beginning of nine tokens
        each.input_ids[5:14] = drawn[0].input_ids[5:14]
    expected = shared_prompt(drawn[0].part(0, 5), [each.part(5, len(each)) for each in drawn])
    for least in (10, NEVER):
        same(packed_rows([[trie_document(drawn, least)]], 0), packed_rows([[expected]], 0))
    assert trie_document(drawn, 9).tokens == expected.tokens - 2 * 9


def test_a_group_is_as_long_as_its_trie():
    """Samples with a long first turn in common fit where their responses, counted one by one, would not."""
    drawn = samples(prompts=1, each=4)
    for each in drawn:
        each.input_ids[: 5 + 30] = drawn[0].input_ids[: 5 + 30]
    assert prompt_groups(drawn, NEVER, most_tokens=90) == [[0, 1], [2, 3]]
    assert prompt_groups(drawn, 8, most_tokens=90) == [[0, 1, 2, 3]]
    assert trie_size(drawn, 8).tokens == 35 + 4 * 10


def test_what_is_joined_begins_alike_and_stays_within_the_row():
    stems = ["abcdefgh", "abcdefxy", "zzzzzzzz", "abcdefgh"]
    parts = [[sequence(stem + ending) for ending in "MN"] for stem in stems]
    plan = PlanSettings(1, packed=True, max_row_tokens=100, least_shared_tokens=6)
    assert joined(parts, plan) == [[0, 1, 3], [2]]
    for changes in ({"least_shared_tokens": 7}, {"max_row_tokens": 13}):
        assert joined(parts, PlanSettings(**{**vars(plan), **changes})) == [[0, 3], [1], [2]]
    # On two ranks a group has at most a quarter of all 40 tokens.
    assert joined(parts, PlanSettings(**{**vars(plan), "ranks": 2})) == [[0], [1], [2], [3]]
    for changes in ({"least_shared_tokens": 0}, {"packed": False}):
        assert joined(parts, PlanSettings(**{**vars(plan), **changes})) == [[0], [1], [2], [3]]


def test_images_are_shared_where_they_are_the_same():
    def seen(key: int, ending: str) -> TokenSequence:
        return sequence("pq----" + ending, (MediaSpan(2, 4, (2, 2), key),))

    document = trie_document([seen(7, "sT"), seen(8, "sT"), seen(7, "sU")], least_tokens=1)
    assert texts(document) == ["pq", "----s", "t", "u", "----st"]
    assert [len(part.tokens.media) for part in document.segments] == [0, 1, 0, 0, 1]
    assert [part.first_position for part in document.segments] == [0, 2, 5, 5, 2]  # a grid of 2 x 2 takes 2 positions
    assert [span.key for span in packed_rows([[document]], 0).media.spans] == [7, 8]


PROMPT, RESPONSE = 4, 5


def sampled(first_expert: int, at: int | None = None, ids=(5, 6, 7, 8, 9)) -> TokenSequence:
    """A prompt with a response; its token number `at` is computed by other experts."""
    tokens = torch.tensor([1, 2, 3, 4, *ids])
    experts = torch.arange(len(tokens) * 4, dtype=torch.int16).view(-1, 2, 2) + first_expert
    if at is not None:
        experts[at, 1, 0] += 1
    return TokenSequence(tokens, torch.arange(len(tokens)) >= PROMPT, experts=experts)


def test_tokens_of_other_experts_stand_by_themselves():
    one, same, other = sampled(0), sampled(0), sampled(0, at=6)
    alike = trie_document([one, same], least_tokens=1)
    assert sum(len(segment.tokens) for segment in alike.segments) == PROMPT + RESPONSE
    apart = trie_document([one, other], least_tokens=1)
    assert [len(segment.tokens) for segment in apart.segments] == [6, 3, 3]
    for document, sequences in ((alike, [one, same]), (apart, [one, other])):
        for number, sequence in enumerate(sequences):
            held = together([document.segments[index].tokens for index in document.held_by(number)])
            assert torch.equal(held.input_ids, sequence.input_ids) and torch.equal(held.experts, sequence.experts)


def test_prompts_of_other_experts_are_no_group():
    sequences = [sampled(0), sampled(0, at=8), sampled(0, at=1), sampled(0)]
    assert prompt_groups(sequences, 1, 100) == [[0, 1, 3], [2]]
    assert first_alike(sequences) == [0, 1, 2, 0]


def test_rows_have_the_experts_of_their_tokens():
    plan = PlanSettings(1, 40, 8, packed=True, max_row_tokens=40, least_shared_tokens=1)
    sequences = [sampled(0), sampled(0, at=6), sampled(3)]
    (share,) = rank_share(sequences, SequenceLayout(plan, 0), torch.device("cpu"))
    rows = share.rows
    ids, experts = rows.input_ids_NT.flatten(), rows.experts_NTLK.flatten(0, 1)
    assert experts.dtype == torch.int16 and bool((experts[rows.segment_ids_NT.flatten() == -1] == -1).all())
    read = {(int(token), int(own[0, 0])) for token, own in zip(ids, experts, strict=True) if token}
    expected = {(int(t), int(e[0, 0])) for each in sequences for t, e in zip(each.input_ids, each.experts, strict=True)}
    assert read == expected
    assert packed_rows([], 0).experts_NTLK is None


def test_texts_between_rollouts_are_free():
    free = TokenSequence(torch.tensor([1, 2]), torch.tensor([False, True]))
    rows = packed_rows([[trie_document([free], 1), trie_document([sampled(0)], 1)]], 0)
    assert rows.experts_NTLK.shape == (1, 11, 2, 2) and bool((rows.experts_NTLK[0, :2] == -1).all())
    assert torch.equal(rows.experts_NTLK[0, 2:], sampled(0).experts)
    assert rows.of_free_experts().experts_NTLK is None
