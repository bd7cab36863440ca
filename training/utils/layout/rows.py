"""Documents laid out as rows of tokens, the form in which every step feeds a model (`TokenRows`): a row holds one
document, padded on the right (`padded_rows`), or several (`packed_rows`).

Documents may hold more than text. A run has one `RunMedia`, which gives rows what its media have for them, or None
where its rows are text alone; a step hands it on as it is.

N rows, T tokens in a row, B sequences, M tokens to be predicted, S segments of a row (padding is one more).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import torch

from training.utils.contracts.documents import UNKNOWN, Document, TokenSequence, plain, unshared
from training.utils.contracts.token_rows import (
    PAD_SEGMENT,
    MediaRun,
    RepeatedTargets,
    SegmentMap,
    Slots,
    TokenRows,
    media_of_rows,
)
from training.utils.layout.planner import DocumentSize, plain_size

if TYPE_CHECKING:
    from training.utils.contracts.media import RunMedia
    from training.utils.layout.planner import MicroBatch


def padded_rows(sequences: Sequence[TokenSequence], pad_token_id: int, min_width: int = 1) -> TokenRows:
    """Lay out one sequence per row, padded on the right to the longest (or to `min_width`).

    Causal attention hides padding on the right, so no mask is needed. No sequences give one row of padding without
    targets: a rank with nothing left to do still runs the same collectives.
    """
    return packed_rows([[plain(sequence)] for sequence in sequences], pad_token_id, min_width)


def packed_rows(
    rows: Sequence[Sequence[Document]], pad_token_id: int, min_width: int = 1, with_before: bool = False
) -> TokenRows:
    """Lay out the documents of each row one after the other. Sequences are numbered row by row.

    Positions of a document start at 0. Without a mask they continue through the padding: transformers takes positions
    that restart for packed sequences. With a mask, padding is at 0: the document of a shared prompt may be longer than
    a model's positions.
    """
    lengths = [sum(document.tokens for document in row) for row in rows]
    width, count = max([min_width, *lengths]), max(1, len(rows))
    most_segments = max([1, *(sum(len(document.segments) for document in row) for row in rows)])
    input_ids_NT = torch.full((count, width), pad_token_id, dtype=torch.int64)
    one_segment_rows = all(len(row) == 1 and len(row[0].segments) == len(row[0].ends) == 1 for row in rows)
    padding_T = torch.arange(width) if one_segment_rows else torch.zeros(width, dtype=torch.int64)
    position_ids_NT = padding_T.repeat(count, 1)
    segment_ids_NT = torch.full((count, width), PAD_SEGMENT, dtype=torch.int64)
    visible_NSS = torch.eye(most_segments + 1, dtype=torch.bool).repeat(count, 1, 1)
    copies_NS = torch.zeros(count, most_segments + 1, dtype=torch.int64)
    before_NT = torch.arange(count * width).view(count, width) if with_before else None
    targets: list[tuple[torch.Tensor, ...]] = [(torch.empty(0, dtype=torch.int64),) * 4]
    ends: list[int] = []
    for n, row in enumerate(rows):
        column = segments_before = 0
        for document in row:
            lasts = list[int]()
            for index, segment in enumerate(document.segments):
                length = len(segment.tokens)
                here = slice(column, column + length)
                input_ids_NT[n, here] = segment.tokens.input_ids
                position_ids_NT[n, here] = torch.arange(segment.first_position, segment.first_position + length)
                segment_ids_NT[n, here] = segments_before + index
                copies_NS[n, segments_before + index] = document.copies[index]
                if before_NT is not None:
                    before_NT[n, column + 1 : column + length] -= 1
                    if segment.predecessor is not None:
                        before_NT[n, column] = lasts[segment.predecessor]
                for seen in segment.sees:
                    visible_NSS[n, segments_before + index, segments_before + seen] = True
                column += length
                lasts.append(n * width + column - 1)
            targets += _targets(document, lasts, first_sequence=len(ends))
            ends += [lasts[end] for end in document.ends]
            segments_before += len(document.segments)
    target_ids_M, predictor_M, sequence_M, place_M = (torch.cat(parts) for parts in zip(*targets, strict=True))
    segments = None if one_segment_rows else SegmentMap(visible_NSS, copies_NS, repeats=_repeats(rows, place_M))
    return TokenRows(
        input_ids_NT=input_ids_NT,
        position_ids_NT=position_ids_NT,
        segment_ids_NT=segment_ids_NT,
        target_ids_M=target_ids_M,
        predictor_M=predictor_M,
        sequence_M=sequence_M,
        end_B=torch.tensor(ends, dtype=torch.int64),
        segments=segments,
        slots=Slots(before_NT, _given_experts(rows, count, width)),
        media=media_of_rows(_media(rows), position_ids_NT),
    )


def _given_experts(rows: Sequence[Sequence[Document]], count: int, width: int) -> torch.Tensor | None:
    """Return `experts_NTLK`; None where no token's are given."""
    each = [[segment.tokens for document in row for segment in document.segments] for row in rows]
    first = next((tokens.experts for row in each for tokens in row if tokens.experts is not None), None)
    if first is None:
        return None
    experts_NTLK = torch.full((count, width, *first.shape[1:]), UNKNOWN, dtype=torch.int16)
    for own_TLK, row in zip(experts_NTLK, each, strict=True):
        column = 0
        for tokens in row:
            if tokens.experts is not None:
                own_TLK[column : column + len(tokens)] = tokens.experts
            column += len(tokens)
    return experts_NTLK


def _media(rows: Sequence[Sequence[Document]]) -> Iterator[list[MediaRun]]:
    """Yield for each document what stands in its segments besides text, and where these are."""
    for n, row in enumerate(rows):
        column = 0
        for document in row:
            runs = list[MediaRun]()
            for part in document.segments:
                runs.append(MediaRun(n, column, len(part.tokens), part.first_position, part.tokens.media))
                column += len(part.tokens)
            yield runs


def _targets(document: Document, lasts: Sequence[int], first_sequence: int) -> list[tuple[torch.Tensor, ...]]:
    """Return, sequence by sequence, the target ids, predictors, sequences and flat positions of the targets in each
    segment that the sequence owns. lasts: flat position of each segment's last token."""
    owned: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in document.ends]
    for last, segment, owners in zip(lasts, document.segments, document.owners, strict=True):
        columns = torch.nonzero(segment.tokens.is_target).flatten()
        places = last + 1 - len(segment.tokens) + columns
        predictors = places - 1
        if segment.predecessor is not None and columns.numel() and columns[0] == 0:
            predictors[0] = lasts[segment.predecessor]
        ids = segment.tokens.input_ids[columns]
        for owner in owners:
            owned[owner].append((ids, predictors, torch.full_like(columns, first_sequence + owner), places))
    return [part for parts in owned for part in parts]


def _repeats(rows: Sequence[Sequence[Document]], place_M: torch.Tensor) -> RepeatedTargets | None:
    """Return the repeats of targets at these flat positions; None where no two share one."""
    if all(len(owners) <= 1 for row in rows for document in row for owners in document.owners):
        return None
    _, first_U, read_M = np.unique(place_M.numpy(), return_index=True, return_inverse=True)
    return RepeatedTargets(read_M=torch.from_numpy(read_M), first_U=torch.from_numpy(first_U))


def lacks_media(step: Sequence[Sequence[MicroBatch]], rank: int, held: Sequence[bool]) -> list[bool]:
    """Return for each of a rank's micro-batches whether it has no media where that of another rank has some.

    Under ZeRO-3 the ranks gather a module's weights together, and below it they add up its gradients together: what
    reads media must run on all ranks or on none.

    step: of `plan_step`. held: for each document of the step, whether it holds media.
    """
    found = [[any(held[index] for row in rows for index in row) for rows in mine] for mine in step]
    return [any(column) and not column[rank] for column in zip(*found, strict=True)]


def laid_out(
    documents: Sequence[Sequence[Document]],
    pad_token_id: int,
    media: RunMedia | None,
    lacks: bool = False,
    *,
    with_before: bool = False,
) -> TokenRows:
    """Return `packed_rows` with what a model reads of their media.

    lacks: of `lacks_media`. The document that is then added is no sequence, and nothing sees it; it stands at the end
        of the last row where rows hold several documents, and else in a row of its own.
    """
    if media is None:
        return packed_rows(documents, pad_token_id, with_before=with_before)
    rows = [list(row) for row in documents]
    if lacks and any(len(row) > 1 for row in rows):
        rows[-1].append(media.alone)
    elif lacks:
        rows.append([media.alone])
    made = packed_rows(rows, pad_token_id, with_before=with_before)
    return media.loaded(replace(made, end_B=made.end_B[:-1]) if lacks else made)


@dataclass(frozen=True)
class RankedRows:
    """A micro-batch of prompts with their responses as sequences, and which should beat which.

    better_Q, worse_Q: int64, indices of sequences (as in `rows.end_B` and `rows.sequence_M`).
    weight_Q: float32, each pair's share of its prompt; the pairs of one prompt add up to 1.
    """

    rows: TokenRows
    better_Q: torch.Tensor
    worse_Q: torch.Tensor
    weight_Q: torch.Tensor


def ranked_rows(
    rows: Sequence[Sequence[Document]],
    shared: bool,
    pad_token_id: int,
    responses: Sequence[int] | None = None,
    *,
    media: RunMedia | None = None,
    lacks: bool = False,
) -> RankedRows:
    """Lay out documents whose sequences are the responses to their prompts, best first, and list the pairs: i beats j
    for i < j of one prompt. shared: the prompt once for all its responses; otherwise each response has its own row.
    responses: how many each prompt has, where a document may have several prompts; None: each has one. media, lacks:
    see `laid_out`."""
    better: list[int] = []
    worse: list[int] = []
    weights: list[float] = []
    first = 0
    for count in [len(document.ends) for row in rows for document in row] if responses is None else responses:
        pairs = list(combinations(range(first, first + count), 2))
        better += [winner for winner, _ in pairs]
        worse += [loser for _, loser in pairs]
        weights += [1.0 / max(len(pairs), 1)] * len(pairs)
        first += count
    if not shared:
        rows = [[alone] for row in rows for document in row for alone in unshared(document)]
    return RankedRows(
        rows=laid_out(rows, pad_token_id, media, lacks),
        better_Q=torch.tensor(better, dtype=torch.int64),
        worse_Q=torch.tensor(worse, dtype=torch.int64),
        weight_Q=torch.tensor(weights, dtype=torch.float32),
    )


def planned_size(prompt_tokens: int, response_tokens: Sequence[int], shared: bool) -> DocumentSize:
    """Return the size of a prompt with its responses, for the planner: unless shared, one row per response, padded to
    the longest."""
    if not shared:
        row, rows = plain_size(prompt_tokens + max(response_tokens)), len(response_tokens)
        return DocumentSize(rows * row.tokens, rows * row.pairs)
    pairs = [prompt_tokens * tokens + plain_size(tokens).pairs for tokens in response_tokens]
    return DocumentSize(prompt_tokens + sum(response_tokens), plain_size(prompt_tokens).pairs + sum(pairs))


def beyond_shortest(ranked: RankedRows) -> torch.Tensor:
    """Return bool [M], True for tokens of a response beyond the length of its prompt's shortest response (the second
    part of LD-DPO's likelihood: Liu et al. 2024, length desensitization, who have two responses)."""
    sequence_M, sequences = ranked.rows.sequence_M, ranked.rows.end_B.numel()
    tokens_B = torch.bincount(sequence_M, minlength=sequences)
    shortest_B = tokens_B.clone()
    for here_Q, other_Q in ((ranked.better_Q, ranked.worse_Q), (ranked.worse_Q, ranked.better_Q)):
        shortest_B = shortest_B.scatter_reduce(0, here_Q, tokens_B.index_select(0, other_Q), "amin")
    by_sequence = torch.argsort(sequence_M, stable=True)
    starts_B = tokens_B.cumsum(0) - tokens_B
    places = torch.arange(sequence_M.numel(), device=sequence_M.device) - starts_B[sequence_M[by_sequence]]
    place_M = torch.empty_like(sequence_M).scatter(0, by_sequence, places)
    return place_M >= shortest_B[sequence_M]


def sequence_sums(values_M: torch.Tensor, sequence_M: torch.Tensor, sequences: int) -> torch.Tensor:
    """Return [B], the sum of each sequence's values; sequence_M: int64, the sequence each belongs to."""
    return values_M.new_zeros(sequences).index_add(0, sequence_M, values_M)
