"""Segments and documents: who sees whom, whose target is whose, and what each sequence is by itself."""

from __future__ import annotations

import pytest
import torch

from training.utils.contracts.documents import (
    Document,
    MediaSpan,
    Segment,
    TokenSequence,
    first_alike,
    join,
    plain,
    shared_prompt,
    unshared,
)


def run(ids: list[int], targets: list[int] = ()) -> TokenSequence:
    is_target = torch.zeros(len(ids), dtype=torch.bool)
    is_target[list(targets)] = True
    return TokenSequence(torch.tensor(ids, dtype=torch.int64), is_target)


def told(document: Document) -> list[tuple[list[int], list[bool]]]:
    """Ids and targets of a document's segments."""
    return [(part.tokens.input_ids.tolist(), part.tokens.is_target.tolist()) for part in document.segments]


def test_a_plain_document():
    document = plain(run([5, 6, 7], [2]))
    assert told(document) == [([5, 6, 7], [False, False, True])]
    assert document.segments[0].sees == () and document.segments[0].first_position == 0
    assert document.segments[0].predecessor is None
    assert (document.ends, document.owners) == ((0,), ((0,),))
    assert document.tokens == 3


def test_a_prompt_with_three_responses():
    document = shared_prompt(run([5, 6]), [run([7, 8], [0, 1]), run([9], [0]), run([1, 2, 3], [0])])
    trunk, *branches = document.segments
    assert trunk.sees == () and trunk.first_position == 0 and trunk.predecessor is None
    for branch in branches:
        assert branch.sees == (0,) and branch.first_position == 2 and branch.predecessor == 0
    assert (document.ends, document.owners) == ((1, 2, 3), ((0,), (0,), (1,), (2,)))
    assert document.tokens == 8  # the prompt once


def test_each_sequence_by_itself():
    document = shared_prompt(run([5, 6]), [run([7, 8], [0, 1]), run([9, 2], [1])])
    first, second = unshared(document)
    assert told(first) == [([5, 6, 7, 8], [False, False, True, True])]
    assert told(second) == [([5, 6, 9, 2], [False, False, False, True])]
    assert first.ends == second.ends == (0,)


def test_the_prompts_own_targets_are_counted_once():
    """A prompt that is to be predicted too is predicted once: by the first sequence."""
    document = shared_prompt(run([5, 6, 4], [1, 2]), [run([7], [0]), run([9], [0])])
    first, second = unshared(document)
    assert told(first) == [([5, 6, 4, 7], [False, True, True, True])]
    assert told(second) == [([5, 6, 4, 9], [False, False, False, True])]


def test_a_plain_document_is_its_own_sequence():
    document = plain(run([5, 6, 7], [1]))
    (alone,) = unshared(document)
    assert told(alone) == told(document)


def test_join_is_prompt_and_targets():
    joined = join(torch.tensor([5, 6]), torch.tensor([7, 8, 9]))
    assert joined.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert joined.is_target.tolist() == [False, False, True, True, True]
    assert len(joined) == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: plain(run([5, 6], [0])),
        lambda: shared_prompt(run([5, 6], [0]), [run([7], [0])]),
        lambda: Document((Segment(run([5], [0])),), (0,), (0,)),
    ],
    ids=["plain", "prompt", "segment"],
)
def test_a_first_token_that_nothing_predicts_is_no_target(make):
    """It would be predicted from the last token of the document that stands before it in the row."""
    with pytest.raises(AssertionError, match="has no predecessor and cannot be a target"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: plain(run([])),
        lambda: shared_prompt(run([]), [run([7], [0])]),
        lambda: shared_prompt(run([5]), [run([])]),
    ],
    ids=["plain", "prompt", "response"],
)
def test_an_empty_segment_is_refused(make):
    """Its end, or what it predicts, would be another document's token."""
    with pytest.raises(AssertionError, match="no tokens"):
        make()


def test_sequences_that_a_model_reads_alike():
    """Whatever is to be predicted of them."""
    image, other = (MediaSpan(0, 1, key=key) for key in (1, 2))
    ids = torch.tensor([5, 6, 7])
    with_images = [TokenSequence(ids, ids > 5, (each,)) for each in (image, other, image)]
    forked = [TokenSequence(ids, ids > 5, forks=forks) for forks in ((1,), (2,), (1,))]
    sequences = [run([5, 6, 7], [2]), run([5, 6]), run([5, 6, 7]), *with_images, *forked, run([5, 6])]
    assert first_alike(sequences) == [0, 1, 0, 3, 4, 3, 6, 7, 6, 1]
