"""Rows of tokens: the form in which every step feeds a model.

`TokenRows` holds the tokens, who sees whom, and which tokens are predicted from which position. A row holds one
document, padded on the right (`padded_rows`), or several (`packed_rows`).

N rows, T tokens in a row, B sequences, M tokens to be predicted, S segments of a row (padding is one more).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional

from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import PAD_SEGMENT, Document, Segment, TokenSequence, plain
from training.utils.images.spans import ImagePixels, ImageSpan, position_axes
from training.utils.layout.runs import RunLengths, lengths_of, runs_of
from training.utils.layout.transfer import moved


@dataclass(frozen=True)
class TokenRows:
    """A micro-batch as a model sees it.

    Worked example: the sequences [5 6 7*] and [8 9*] (* to be predicted) in padded rows, pad id 0:
        input_ids_NT   [[5 6 7], [8 9 0]]      position_ids_NT [[0 1 2], [0 1 2]]
        segment_ids_NT [[0 0 0], [0 0 -1]]     visible_NSS None
        target_ids_M [7 9]   predictor_M [1 3]   sequence_M [0 1]   end_B [2 4]
    and packed into one row:
        input_ids_NT   [[5 6 7 8 9]]           position_ids_NT [[0 1 2 0 1]]
        segment_ids_NT [[0 0 0 1 1]]           visible_NSS [[[T F], [F T]]]
        target_ids_M [7 9]   predictor_M [1 3]   sequence_M [0 1]   end_B [2 4]

    input_ids_NT, position_ids_NT, segment_ids_NT: int64; segment -1 is padding.
    visible_NSS: bool, may segment s look at segment t; None if every row is one document of one segment, for which
        causal attention is enough.
    target_ids_M: int64, the tokens to predict, sequence by sequence: one that several share is there for each.
    predictor_M: int64, flat position n*T+t whose hidden state predicts each target.
    sequence_M: int64, the sequence each target belongs to.
    read_M, first_U: int64, which of the U different targets each of the M is, and the first of the M that each of the U
        is: a model reads those alone (`reads`). None where no two are the same.
    end_B: int64, flat position of each sequence's last real token.
    copies_NS: int64, how many sequences hold each segment (padding, the last column, is 0); None as `visible_NSS`.
    run_lengths: what varlen attention takes; made when the rows leave the host, None as `visible_NSS`.
    before_NT: int64, flat position of the token before each in its sequence; a sequence's first token and padding have
        their own. None unless asked for.
    axes_3NT: int64, positions along time, height and width, which replace `position_ids_NT`; None unless an image of
        the rows counts by its sides.
    blocks_NT: int64, a number above 0 for each image whose tokens all see each other, 0 elsewhere; None without such
        images.
    images: of the rows, in the order of their tokens, row by row. An image of a shared prompt is there once.
    image_counts: how many of these each document has.
    pixels: of these images; given to the rows by what decodes them.
    """

    input_ids_NT: torch.Tensor
    position_ids_NT: torch.Tensor
    segment_ids_NT: torch.Tensor
    visible_NSS: torch.Tensor | None
    target_ids_M: torch.Tensor
    predictor_M: torch.Tensor
    sequence_M: torch.Tensor
    end_B: torch.Tensor
    copies_NS: torch.Tensor | None = None
    run_lengths: RunLengths | None = None
    before_NT: torch.Tensor | None = None
    read_M: torch.Tensor | None = None
    first_U: torch.Tensor | None = None
    axes_3NT: torch.Tensor | None = None
    blocks_NT: torch.Tensor | None = None
    images: tuple[ImageSpan, ...] = ()
    image_counts: tuple[int, ...] = ()
    pixels: ImagePixels | None = None

    def to(self, device: torch.device | str) -> TokenRows:
        leaves_host = self.input_ids_NT.device.type == "cpu" and torch.device(device).type != "cpu"
        return moved(self.leaving_host() if leaves_host else self, device)

    def leaving_host(self) -> TokenRows:
        """Return the same rows with their `run_lengths`, which on a device would cost a wait."""
        return replace(self, run_lengths=self.lengths())

    def lengths(self) -> RunLengths | None:
        """Return `run_lengths`, made now where the rows have none (on a device: a wait for it); None if every row is
        one document."""
        if self.run_lengths is not None or self.visible_NSS is None:
            return self.run_lengths
        return lengths_of(runs_of(self.segment_ids_NT, self.visible_NSS)).to(self.input_ids_NT.device)

    def copies_NT(self) -> torch.Tensor:
        """Return int64 [N, T]: how often each token stands in the separate sequences that the rows hold; 0 is padding.
        A prompt that K responses share counts K times."""
        if self.copies_NS is None:
            return (self.segment_ids_NT != PAD_SEGMENT).long()
        return self.copies_NS.gather(1, self.segment_ids_NT % self.copies_NS.shape[1])

    def of_whole_sequences(self, parts: Sequence[int]) -> TokenRows:
        """Return the same rows with the sequences counted whole that they hold in parts, one after the other: `parts`
        says of how many each is. A sequence ends where its last part does."""
        whole_B, last_B = torch.tensor(parts), torch.tensor(parts).cumsum(0) - 1
        number_of_part = torch.arange(len(parts)).repeat_interleave(whole_B)
        return replace(self, sequence_M=number_of_part[self.sequence_M], end_B=self.end_B[last_B])

    def reads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the different targets of the rows and what predicts them, int64 [U] each; `target_ids_M` and
        `predictor_M` where no two targets are the same."""
        if self.first_U is None:
            return self.target_ids_M, self.predictor_M
        return self.target_ids_M[self.first_U], self.predictor_M[self.first_U]

    def without_targets(self) -> TokenRows:
        """Return the same rows with nothing to predict: their forward computes no logits."""
        parts = (self.target_ids_M, self.predictor_M, self.sequence_M)
        ids, predictors, sequences = (part[:0] for part in parts)
        bare = replace(self, target_ids_M=ids, predictor_M=predictors, sequence_M=sequences)
        return replace(bare, read_M=None, first_U=None)

    def dense_mask(self) -> torch.Tensor | None:
        """Return bool [N, 1, T, T], True where a token may look, or None if causal attention is enough: to what its
        segment sees and was before it, and to all of its own image where that sees itself.

        Padding sees itself: a mask row of only False gives NaN in some attention kernels.
        """
        if self.visible_NSS is None and self.blocks_NT is None:
            return None
        width = self.segment_ids_NT.shape[1]
        causal_TT = torch.ones(width, width, dtype=torch.bool, device=self.segment_ids_NT.device).tril()
        mask_NTT = causal_TT if self.visible_NSS is None else self._seen(self.visible_NSS) & causal_TT
        if self.blocks_NT is not None:
            looked_at_N1T = self.blocks_NT.unsqueeze(1)
            mask_NTT = mask_NTT | ((self.blocks_NT.unsqueeze(2) == looked_at_N1T) & (looked_at_N1T > 0))
        return mask_NTT.unsqueeze(1)

    def _seen(self, visible_NSS: torch.Tensor) -> torch.Tensor:
        """Return bool [N, T, T], True where the segment of a token sees that of another."""
        looking_NT = self.segment_ids_NT % visible_NSS.shape[1]  # -1, padding, is the last segment
        rows_N11 = torch.arange(len(looking_NT), device=looking_NT.device).view(-1, 1, 1)
        return visible_NSS[rows_N11, looking_NT.unsqueeze(2), looking_NT.unsqueeze(1)]

    def cumulative_lengths(self) -> tuple[torch.Tensor, int]:
        """Return what FlashAttention takes instead of a mask: where each document begins in the flattened rows, and the
        end, int32 [documents + 1], with a row's padding as one document; and the longest in tokens.

        ThreestepError if a segment sees another, which lengths cannot express.
        """
        if self.visible_NSS is not None:
            own = torch.eye(self.visible_NSS.shape[1], dtype=torch.bool, device=self.visible_NSS.device)
            if bool((self.visible_NSS & ~own).any()):
                raise ThreestepError(
                    "cumulative lengths cannot express that responses share a prompt; use the attention implementation "
                    "sdpa or flex_attention"
                )
        begins_NT = functional.pad(self.segment_ids_NT.diff(dim=1) != 0, (1, 0), value=True)
        begins = functional.pad(begins_NT.flatten(), (0, 1), value=True)
        lengths = torch.nonzero(begins).flatten().to(torch.int32)
        return lengths, int(lengths.diff().max())


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
    images = tuple(image for _, _, part in _placed(rows) for image in part.tokens.images)
    target_ids_M, predictor_M, sequence_M, place_M = (torch.cat(parts) for parts in zip(*targets, strict=True))
    first_U, read_M = _different(rows, place_M)
    return TokenRows(
        input_ids_NT=input_ids_NT,
        position_ids_NT=position_ids_NT,
        segment_ids_NT=segment_ids_NT,
        visible_NSS=None if one_segment_rows else visible_NSS,
        target_ids_M=target_ids_M,
        predictor_M=predictor_M,
        sequence_M=sequence_M,
        end_B=torch.tensor(ends, dtype=torch.int64),
        copies_NS=None if one_segment_rows else copies_NS,
        before_NT=before_NT,
        read_M=read_M,
        first_U=first_U,
        axes_3NT=_axes(rows, position_ids_NT) if any(image.sides for image in images) else None,
        blocks_NT=_blocks(rows, position_ids_NT) if any(image.sees_itself for image in images) else None,
        images=images,
        image_counts=tuple(
            sum(len(part.tokens.images) for part in document.segments) for row in rows for document in row
        ),
    )


def _placed(rows: Sequence[Sequence[Document]]) -> Iterator[tuple[int, int, Segment]]:
    """Yield each segment with its row and the column of its first token."""
    for n, row in enumerate(rows):
        column = 0
        for part in (part for document in row for part in document.segments):
            yield n, column, part
            column += len(part.tokens)


def _axes(rows: Sequence[Sequence[Document]], position_ids_NT: torch.Tensor) -> torch.Tensor:
    """Return `TokenRows.axes_3NT` of these documents; padding is where `position_ids_NT` has it."""
    axes_3NT = position_ids_NT.repeat(3, 1, 1)
    for n, column, part in _placed(rows):
        axes_3T = part.first_position + position_axes(len(part.tokens), part.tokens.images)
        axes_3NT[:, n, column : column + len(part.tokens)] = axes_3T
    return axes_3NT


def _blocks(rows: Sequence[Sequence[Document]], position_ids_NT: torch.Tensor) -> torch.Tensor:
    """Return `TokenRows.blocks_NT` of these documents."""
    blocks_NT, number = torch.zeros_like(position_ids_NT), 0
    for n, column, part in _placed(rows):
        for image in part.tokens.images:
            if image.sees_itself:
                number += 1
                blocks_NT[n, column + image.begin : column + image.end] = number
    return blocks_NT


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


def _different(
    rows: Sequence[Sequence[Document]], place_M: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `TokenRows.first_U` and `read_M` of targets at these positions; None where no two share one."""
    if all(len(owners) <= 1 for row in rows for document in row for owners in document.owners):
        return None, None
    _, first_U, read_M = np.unique(place_M.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first_U), torch.from_numpy(read_M)
