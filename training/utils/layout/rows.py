"""Rows of tokens: the one form in which every step feeds a model.

A `TokenRows` says which tokens stand where, who sees whom, and which tokens are to be predicted from which
position. Today each row holds one sequence and the shorter rows are padded on the right; packing and shared
prompts come behind the same record. Knows no model, no tokenizer and no loss.

N rows, T tokens in a row, B sequences, M tokens to be predicted, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAD_SEGMENT = -1


@dataclass(frozen=True)
class TokenSequence:
    """One sequence before it is laid out.

    input_ids: int64 [length], length >= 1.
    is_target: bool [length]; True where the token is to be predicted. The first token has no predecessor and
        cannot be a target.
    """

    input_ids: torch.Tensor
    is_target: torch.Tensor

    def __len__(self) -> int:
        return int(self.input_ids.numel())


@dataclass(frozen=True)
class TokenRows:
    """A micro-batch as a model sees it.

    Worked example: the sequences [5 6 7*] and [8 9*] (* to be predicted) in padded rows, pad id 0:
        input_ids_NT   [[5 6 7], [8 9 0]]      position_ids_NT [[0 1 2], [0 1 2]]
        segment_ids_NT [[0 0 0], [0 0 -1]]
        target_ids_M [7 9]   predictor_M [1 3]   sequence_M [0 1]   end_B [2 4]

    input_ids_NT, position_ids_NT, segment_ids_NT: int64; segment -1 is padding.
    target_ids_M: int64, the tokens to be predicted, in the order of the sequences.
    predictor_M: int64, flat position n*T+t whose hidden state predicts each target.
    sequence_M: int64, the sequence each target belongs to.
    end_B: int64, flat position of each sequence's last real token.
    """

    input_ids_NT: torch.Tensor
    position_ids_NT: torch.Tensor
    segment_ids_NT: torch.Tensor
    target_ids_M: torch.Tensor
    predictor_M: torch.Tensor
    sequence_M: torch.Tensor
    end_B: torch.Tensor

    @property
    def real_tokens(self) -> int:
        """Tokens that are no padding."""
        return int((self.segment_ids_NT != PAD_SEGMENT).sum())

    def to(self, device: torch.device | str) -> TokenRows:
        return TokenRows(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})


def padded_rows(sequences: Sequence[TokenSequence], pad_token_id: int, min_width: int = 1) -> TokenRows:
    """Lay out one sequence a row, padded on the right to the longest (or to `min_width`).

    Padding sits to the right of every real token, so that causal attention alone keeps it unseen and no mask is
    needed. Positions count on through the padding: positions that start again would read as packed sequences to
    transformers. With no sequences at all the result is one row of padding without targets: a rank that has
    nothing left to do still runs the same collectives.
    """
    width = max([min_width, *(len(sequence) for sequence in sequences)])
    count = max(1, len(sequences))
    input_ids_NT = torch.full((count, width), pad_token_id, dtype=torch.int64)
    segment_ids_NT = torch.full((count, width), PAD_SEGMENT, dtype=torch.int64)
    target_ids, predictors, owners, ends = [], [], [], []
    for row, sequence in enumerate(sequences):
        length = len(sequence)
        if bool(sequence.is_target[0]):
            raise AssertionError("the first token of a sequence has no predecessor and cannot be a target")
        input_ids_NT[row, :length] = sequence.input_ids
        segment_ids_NT[row, :length] = 0
        columns = torch.nonzero(sequence.is_target).flatten()
        target_ids.append(sequence.input_ids[columns])
        predictors.append(row * width + columns - 1)
        owners.append(torch.full((columns.numel(),), row, dtype=torch.int64))
        ends.append(row * width + length - 1)
    nothing = torch.empty(0, dtype=torch.int64)
    return TokenRows(
        input_ids_NT=input_ids_NT,
        position_ids_NT=torch.arange(width).expand(count, width).contiguous(),
        segment_ids_NT=segment_ids_NT,
        target_ids_M=torch.cat([nothing, *target_ids]),
        predictor_M=torch.cat([nothing, *predictors]),
        sequence_M=torch.cat([nothing, *owners]),
        end_B=torch.tensor(ends, dtype=torch.int64),
    )


def join(prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> TokenSequence:
    """Return prompt + response as one sequence whose response tokens are the targets."""
    is_target = torch.zeros(prompt_ids.numel() + response_ids.numel(), dtype=torch.bool)
    is_target[prompt_ids.numel() :] = True
    return TokenSequence(torch.cat([prompt_ids, response_ids]), is_target)
