"""A teacher's likeliest tokens after each beginning, by a key of its token ids: from a file, or from a server.

The key of a beginning depends on its tokens alone, so that any layout of rows finds what belongs to them. M tokens to
be predicted, U different ones of these, k of the teacher's likeliest tokens, n beginnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from threestep.plugins.distillation.divergence import divergence, with_rest
from threestep.plugins.distillation.head_loss import HeadComparison, compared_at_head, copies_of, rows_of_chunk

if TYPE_CHECKING:
    from threestep.plugins.distillation.settings import DivergenceSettings
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.token_model import AtHead, TargetHead

_MASK, _START = 2**64 - 1, 0x9E3779B97F4A7C15
LEAST_REST = 2.0**-24  # half a unit in the last place of float32's 1: a sum of 1 says no more


class TopTokens(NamedTuple):
    """ids_Uk: int64. logprobs_Uk: float32, of these. rest_U: float32, of all others together."""

    ids_Uk: torch.Tensor
    logprobs_Uk: torch.Tensor
    rest_U: torch.Tensor


def key_after(key: int, token: int) -> int:
    """Return the key of a beginning that goes on with `token` (SplitMix64's mixing)."""
    mixed = ((key ^ (token + 1)) * 0xBF58476D1CE4E5B9 + _START) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def keys_of(ids: Iterable[int]) -> list[int]:
    """Return the key of each beginning of a sequence: of its first token, its first two, and so on."""
    found, key = [], _START
    for token in ids:
        key = key_after(key, token)
        found.append(key)
    return found


def keys_of_rows(rows: TokenRows) -> list[int]:
    """Return the key of the beginning that predicts each of the U different targets. rows: with `before_NT`."""
    assert rows.before_NT is not None, "the guest asks for it"
    keys: list[int] = []
    tokens, before = rows.input_ids_NT.flatten().tolist(), rows.before_NT.flatten().tolist()
    for place, (token, at) in enumerate(zip(tokens, before, strict=True)):
        keys.append(key_after(_START if at == place else keys[at], token))
    return [keys[place] for place in rows.reads()[1].tolist()]


def sequences_of_rows(rows: TokenRows) -> list[list[int]]:
    """Return token sequences that have every target of the rows behind its beginning, none of which is the beginning of
    another: the sequences of the rows, each up to its last target. rows: with `before_NT`."""
    assert rows.before_NT is not None, "the guest asks for it"
    tokens, before = rows.input_ids_NT.flatten().tolist(), rows.before_NT.flatten().tolist()
    targets, predictors, _ = rows.reads()
    found: list[list[int]] = []
    covered: set[int] = set()
    for token, place in sorted(zip(targets.tolist(), predictors.tolist(), strict=True), key=lambda each: -each[1]):
        if place in covered:
            continue
        at, ids = place, [token, tokens[place]]
        covered.add(place)
        while before[at] != at:
            at = before[at]
            covered.add(at)
            ids.append(tokens[at])
        found.append(ids[::-1])
    return found


class TopTable:
    """n beginnings with what follows them. ids_nk: int32; logprobs_nk, rest_n: float32."""

    def __init__(self, keys: Sequence[int], ids_nk: np.ndarray, logprobs_nk: np.ndarray, rest_n: np.ndarray) -> None:
        unsorted = np.array(keys, dtype=np.uint64)
        self._keys, first = np.unique(unsorted, return_index=True)
        self.ids_nk, self.logprobs_nk, self.rest_n = ids_nk[first], logprobs_nk[first], rest_n[first]

    def __len__(self) -> int:
        return len(self._keys)

    def lacks(self, keys: Sequence[int]) -> list[int]:
        """Return the places of keys that the table does not have."""
        wanted = np.array(keys, dtype=np.uint64)
        places = np.minimum(np.searchsorted(self._keys, wanted), max(len(self) - 1, 0))
        return list(range(len(keys))) if not len(self) else np.flatnonzero(self._keys[places] != wanted).tolist()

    def of(self, keys: Sequence[int]) -> TopTokens:
        """Return what follows the beginnings with these keys, all of which the table has."""
        places = np.searchsorted(self._keys, np.array(keys, dtype=np.uint64))
        return TopTokens(
            torch.from_numpy(self.ids_nk[places].astype(np.int64)),
            torch.from_numpy(self.logprobs_nk[places]),
            torch.from_numpy(self.rest_n[places]),
        )


def rest_of(logprobs_nk: np.ndarray) -> np.ndarray:
    """Return float32 [n], the log-probability of all tokens but these, where nobody has computed it: of 1 minus their
    sum, which is at least `LEAST_REST`."""
    covered_n = np.exp(logprobs_nk.astype(np.float64)).sum(axis=1)
    return np.log(np.maximum(1.0 - covered_n, LEAST_REST)).astype(np.float32)


def compare_top(top: TopTokens, settings: DivergenceSettings, rows: TokenRows, temperature: float) -> AtHead:
    """Return what compares the student with the teacher's likeliest tokens after the U beginnings of `rows`. See
    `PolicyModel.forward`."""
    assert temperature == 1.0, "checked with the flags: what is stored was read at 1"
    copies_U = copies_of(rows)
    teacher_Uk = torch.cat([top.logprobs_Uk, top.rest_U.unsqueeze(1)], dim=1)

    def at_head(hidden_UH: torch.Tensor, head: TargetHead, chunk_bytes: int) -> HeadComparison:
        def compare(logits_CV: torch.Tensor, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
            student_Ck = with_rest(torch.log_softmax(logits_CV, dim=-1), top.ids_Uk[here])
            teacher_Ck = teacher_Uk[here].to(logits_CV.dtype)
            return divergence(student_Ck, teacher_Ck, settings), top.logprobs_Uk[here].exp().sum(dim=-1)

        rows_C = rows_of_chunk(chunk_bytes, len(head.weight))
        return compared_at_head(hidden_UH, head, copies_U, compare, rows=rows_C)

    return at_head
