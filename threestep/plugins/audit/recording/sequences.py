"""Rows of tokens as the sequences that they hold, each with its prompt: the form of a record.

S sequences, T tokens of all of them one after the other, M tokens to be predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import RowMedia, TokenRows


class RowSequences(NamedTuple):
    """lengths_S, token_ids_T: int64. place_M: int64, where in T each target stands. media: by the names of a record.
    On the CPU."""

    lengths_S: torch.Tensor
    token_ids_T: torch.Tensor
    place_M: torch.Tensor
    media: Mapping[str, torch.Tensor] = MappingProxyType({})

    def spread(self, values_M: torch.Tensor) -> torch.Tensor:
        """Return [T], each target's value at its token, 0 elsewhere."""
        values_M = values_M.detach().cpu()
        values_M = values_M.float() if values_M.dtype in (torch.bfloat16, torch.float16) else values_M
        return values_M.new_zeros(len(self.token_ids_T)).index_copy(0, self.place_M, values_M)


def sequences_of(rows: TokenRows, *, keeps_media: bool = False) -> RowSequences:
    """Return the sequences of rows, without padding; a beginning that several share stands in each. keeps_media: with
    what the model reads beside tokens.

    Worked example, the packed rows of TokenRows' docstring: lengths_S [3 2], token_ids_T [5 6 7 8 9], place_M [2 4].
    ThreestepError for sequences that are not one run of tokens: parallel paths, and conversations with forks.
    """
    width = rows.input_ids_NT.shape[1]
    ids = rows.input_ids_NT.cpu().flatten()
    segment = rows.segment_ids_NT.cpu()
    target_ids_M, predictor_M, sequence_M = (
        part.cpu() for part in (rows.target_ids_M, rows.predictor_M, rows.sequence_M)
    )
    lengths, found, flats, places = [], [ids.new_zeros(0)], [], torch.zeros_like(predictor_M)
    begin = 0
    for sequence, end in enumerate(rows.end_B.tolist()):
        row, column = divmod(end, width)
        seen = segment[row, : column + 1]
        if rows.segments is not None:
            visible_S = rows.segments.visible_NSS[row].cpu()[segment[row, column]]
            held = visible_S[seen] & (seen >= 0)
        else:
            held = seen >= 0
        flat = row * width + held.nonzero().flatten()
        mine = (sequence_M == sequence).nonzero().flatten()
        place_m = torch.searchsorted(flat, predictor_M[mine])
        is_run = bool((place_m + 1 < len(flat)).all()) and torch.equal(ids[flat[place_m + 1]], target_ids_M[mine])
        if not is_run or not torch.equal(flat[place_m], predictor_M[mine]):
            raise ThreestepError(
                "a record needs each sequence to be one contiguous run of tokens, got parallel paths or a conversation "
                "with forks"
            )
        places[mine] = begin + place_m + 1
        lengths.append(len(flat))
        flats.append(flat)
        found.append(ids[flat])
        begin += len(flat)
    media = _recorded(rows.media, flats) if keeps_media and rows.media is not None else {}
    return RowSequences(torch.tensor(lengths, dtype=torch.int64), torch.cat(found), places, media)


def _recorded(media: RowMedia, places: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the media of sequences by a record's names, one sequence after the other. places: [T] of each sequence's
    tokens, flat positions that rise."""
    assert media.read is not None, "a record holds what the model read"
    begins, held, begin = [], [], 0
    for own in places:
        found = torch.searchsorted(own, torch.tensor(media.places)).tolist()
        for index, place in enumerate(found):
            if place < len(own) and int(own[place]) == media.places[index]:
                begins.append(begin + place)
                held.append(index)
        begin += len(own)
    recorded = {
        "media_begins": torch.tensor(begins, dtype=torch.int64),
        "media_tokens": torch.tensor([media.spans[index].tokens for index in held], dtype=torch.int64),
    }
    return recorded | media.read.recorded(held)
