"""Rows of tokens: the one form in which every step feeds a model.

A `TokenRows` says which tokens stand where, who sees whom, and which tokens are to be predicted from which
position. Rows hold one document each, padded on the right (`padded_rows`), or several (`packed_rows`).
Knows no model, no tokenizer and no loss.

N rows, T tokens in a row, B sequences, M tokens to be predicted, S segments of a row (padding is one more).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from training.utils.layout.documents import Document, TokenSequence, plain
from training.utils.run.errors import ThreestepError

PAD_SEGMENT = -1


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
    visible_NSS: bool, may segment s look at segment t; None where every row is one document of one segment, so that
        causal attention alone is right.
    target_ids_M: int64, the tokens to be predicted, sequence by sequence.
    predictor_M: int64, flat position n*T+t whose hidden state predicts each target.
    sequence_M: int64, the sequence each target belongs to.
    end_B: int64, flat position of each sequence's last real token.
    """

    input_ids_NT: torch.Tensor
    position_ids_NT: torch.Tensor
    segment_ids_NT: torch.Tensor
    visible_NSS: torch.Tensor | None
    target_ids_M: torch.Tensor
    predictor_M: torch.Tensor
    sequence_M: torch.Tensor
    end_B: torch.Tensor

    @property
    def real_tokens(self) -> int:
        """Tokens that are no padding."""
        return int((self.segment_ids_NT != PAD_SEGMENT).sum())

    def to(self, device: torch.device | str) -> TokenRows:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: part if part is None else part.to(device) for name, part in parts.items()}
        return TokenRows(**moved)

    def dense_mask(self) -> torch.Tensor | None:
        """Return bool [N, 1, T, T], True where a token may look, or None where causal attention is enough.

        Padding sees itself: a row of a mask that is False throughout gives NaN in some attention kernels.
        """
        if self.visible_NSS is None:
            return None
        count, width = self.segment_ids_NT.shape
        looking_NT = self.segment_ids_NT % self.visible_NSS.shape[1]  # -1, padding, is the last segment
        rows_N11 = torch.arange(count, device=looking_NT.device).view(-1, 1, 1)
        seen_NTT = self.visible_NSS[rows_N11, looking_NT.unsqueeze(2), looking_NT.unsqueeze(1)]
        causal_TT = torch.ones(width, width, dtype=torch.bool, device=looking_NT.device).tril()
        return (seen_NTT & causal_TT).unsqueeze(1)

    def cumulative_lengths(self) -> tuple[torch.Tensor, int]:
        """Return where each document begins in the flattened rows, and the end: int32 [documents + 1], the padding of
        a row counted as one; and the longest in tokens. What FlashAttention takes in place of a mask.

        ThreestepError where a segment sees another: lengths cannot say that.
        """
        if self.visible_NSS is not None:
            own = torch.eye(self.visible_NSS.shape[1], dtype=torch.bool, device=self.visible_NSS.device)
            if bool((self.visible_NSS & ~own).any()):
                raise ThreestepError(
                    "cumulative lengths say where a document ends and not that its responses share a prompt; use the "
                    "attention implementation sdpa or flex_attention"
                )
        segment_NT = self.segment_ids_NT
        begins_NT = torch.ones_like(segment_NT, dtype=torch.bool)
        begins_NT[:, 1:] = segment_NT[:, 1:] != segment_NT[:, :-1]
        starts = torch.nonzero(begins_NT.flatten()).flatten()
        ends = torch.tensor([segment_NT.numel()], device=starts.device)
        lengths = torch.cat([starts, ends]).to(torch.int32)
        return lengths, int(lengths.diff().max())


def padded_rows(sequences: Sequence[TokenSequence], pad_token_id: int, min_width: int = 1) -> TokenRows:
    """Lay out one sequence a row, padded on the right to the longest (or to `min_width`).

    Padding sits to the right of every real token, so that causal attention alone keeps it unseen and no mask is
    needed. With no sequences at all the result is one row of padding without targets: a rank that has nothing left
    to do still runs the same collectives.
    """
    return packed_rows([[plain(sequence)] for sequence in sequences], pad_token_id, min_width)


def packed_rows(rows: Sequence[Sequence[Document]], pad_token_id: int, min_width: int = 1) -> TokenRows:
    """Lay out the documents of each row one after the other. Sequences are numbered row by row.

    Positions of a document start at 0. Where no mask is needed they count on through the padding: positions that
    start again would read as packed sequences to transformers. Under a mask padding is at 0: a shared prompt's
    document may be longer than the positions that a model has.
    """
    lengths = [sum(document.tokens for document in row) for row in rows]
    width, count = max([min_width, *lengths]), max(1, len(rows))
    most_segments = max([1, *(sum(len(document.segments) for document in row) for row in rows)])
    input_ids_NT = torch.full((count, width), pad_token_id, dtype=torch.int64)
    one_segment_rows = all(len(row) == 1 and len(row[0].segments) == 1 for row in rows)
    padding_T = torch.arange(width) if one_segment_rows else torch.zeros(width, dtype=torch.int64)
    position_ids_NT = padding_T.repeat(count, 1)
    segment_ids_NT = torch.full((count, width), PAD_SEGMENT, dtype=torch.int64)
    visible_NSS = torch.eye(most_segments + 1, dtype=torch.bool).repeat(count, 1, 1)
    targets = _Targets()
    for n, row in enumerate(rows):
        column = segments_before = 0
        for document in row:
            starts = []
            for index, segment in enumerate(document.segments):
                length = len(segment.tokens)
                here = slice(column, column + length)
                input_ids_NT[n, here] = segment.tokens.input_ids
                position_ids_NT[n, here] = torch.arange(segment.first_position, segment.first_position + length)
                segment_ids_NT[n, here] = segments_before + index
                for seen in segment.sees:
                    visible_NSS[n, segments_before + index, segments_before + seen] = True
                starts.append(n * width + column)
                column += length
            targets.add(document, starts)
            segments_before += len(document.segments)
    return TokenRows(
        input_ids_NT=input_ids_NT,
        position_ids_NT=position_ids_NT,
        segment_ids_NT=segment_ids_NT,
        visible_NSS=None if one_segment_rows else visible_NSS,
        **targets.tensors(),
    )


class _Targets:
    """Collects what is to be predicted, from where, and where sequences end."""

    def __init__(self) -> None:
        nothing = torch.empty(0, dtype=torch.int64)
        self.ids, self.predictors, self.owners = [nothing], [nothing], [nothing]
        self.ends: list[int] = []

    def add(self, document: Document, starts: Sequence[int]) -> None:
        """starts: flat position of each segment's first token."""
        first_sequence = len(self.ends)
        for start, segment, owner in zip(starts, document.segments, document.owners, strict=True):
            columns = torch.nonzero(segment.tokens.is_target).flatten()
            predictors = start + columns - 1
            if segment.predecessor is not None and columns.numel() and columns[0] == 0:
                before = segment.predecessor
                predictors[0] = starts[before] + len(document.segments[before].tokens) - 1
            self.ids.append(segment.tokens.input_ids[columns])
            self.predictors.append(predictors)
            self.owners.append(torch.full((columns.numel(),), first_sequence + owner, dtype=torch.int64))
        self.ends += [starts[end] + len(document.segments[end].tokens) - 1 for end in document.ends]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            "target_ids_M": torch.cat(self.ids),
            "predictor_M": torch.cat(self.predictors),
            "sequence_M": torch.cat(self.owners),
            "end_B": torch.tensor(self.ends, dtype=torch.int64),
        }
