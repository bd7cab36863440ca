"""Bad words: token sequences that a response never completes.

The last token of a sequence cannot be drawn when the preceding tokens, of prompt and response, match the rest. Other
tokenizations of the same text are not detected. A rows, K tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOTHING = -1  # not a token id
_ANYTHING = -2  # before the beginning of a sequence


class BadWords:
    """The sequences, and the end of each prompt, where a sequence may have begun. W sequences, U tokens that end one.
    `banned` reads nothing on the host."""

    def __init__(
        self, words: Sequence[Sequence[int]], prompt_ids_BP: torch.Tensor, prompt_mask_BP: torch.Tensor
    ) -> None:
        device = prompt_ids_BP.device
        reach = max(len(word) for word in words) - 1
        before = [[*[_ANYTHING] * (reach + 1 - len(word)), *word[:-1]] for word in words]
        self._before_WK = torch.tensor(before, device=device).view(len(words), reach)
        self._anything_WK = self._before_WK == _ANYTHING
        last_ids = sorted({word[-1] for word in words})
        self._last_U = torch.tensor(last_ids, device=device)
        ends = [[float(word[-1] == last_id) for last_id in last_ids] for word in words]
        self._ends_WU = torch.tensor(ends, device=device)
        known_BP = prompt_ids_BP.masked_fill(~prompt_mask_BP, _NOTHING)
        padded_BP = torch.nn.functional.pad(known_BP, (reach, 0), value=_NOTHING)
        self._prompt_ends_BK = padded_BP[:, padded_BP.shape[1] - reach :]

    @classmethod
    def of_texts(cls, words: Sequence[Sequence[int]], device: torch.device) -> BadWords:
        """The sequences alone: whoever draws knows what stands before."""
        nothing = torch.empty(1, 0, dtype=torch.int64, device=device)
        return cls(words, nothing, nothing.bool())

    def recent_of(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return int64 [A, K], the last tokens of texts."""
        reach = self._before_WK.shape[1]
        ends = [list(ids[len(ids) - reach :]) if len(ids) > reach else list(ids) for ids in texts]
        padded = [[_NOTHING] * (reach - len(ids)) + ids for ids in ends]
        return torch.tensor(padded, dtype=torch.int64, device=self._before_WK.device).view(len(texts), reach)

    def recent(self, response_ids_BR: torch.Tensor, rows_A: torch.Tensor) -> torch.Tensor:
        """Return int64 [A, K], the last tokens of rows `rows_A`, whose responses so far are `response_ids_BR`."""
        reach = self._before_WK.shape[1]
        recent_BK = response_ids_BR[:, max(0, response_ids_BR.shape[1] - reach) :]
        recent_AK = torch.cat([self._prompt_ends_BK[rows_A], recent_BK[rows_A]], dim=1)
        return recent_AK[:, recent_AK.shape[1] - reach :]

    def recent_at(self, response_ids_BR: torch.Tensor, rows_A: torch.Tensor, starts_A: torch.Tensor) -> torch.Tensor:
        """Return the same where of each row only the tokens before its own place `starts_A` are drawn."""
        held_AL = torch.cat([self._prompt_ends_BK[rows_A], response_ids_BR[rows_A]], dim=1)
        return held_AL.gather(1, starts_A.unsqueeze(1) + torch.arange(self._before_WK.shape[1], device=rows_A.device))

    @staticmethod
    def after(recent_AK: torch.Tensor, token_A: torch.Tensor) -> torch.Tensor:
        """Return the last tokens once `token_A` are drawn."""
        return torch.cat([recent_AK, token_A.unsqueeze(1)], dim=1)[:, 1:]

    def banned(self, recent_AK: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return bool [A, V], True for each token that would complete a sequence after the tokens `recent_AK`."""
        matches_AW = ((recent_AK.unsqueeze(1) == self._before_WK) | self._anything_WK).all(dim=-1)
        ends_AU = matches_AW.float() @ self._ends_WU > 0
        banned_AV = torch.zeros(len(recent_AK), vocabulary, dtype=torch.bool, device=recent_AK.device)
        return banned_AV.index_copy_(1, self._last_U, ends_AU)


def tokens_of_words(
    words: Sequence[str], tokenizer: PreTrainedTokenizerBase, end_token_id: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the start of a text and, if different, after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            if ids == (end_token_id,):
                raise ThreestepError(
                    f"--bad_words expects texts other than the token that ends a response, got '{word}', without which "
                    "no response would end before --max_answer_seq_len; leave it out"
                )
            found[ids] = None
    return tuple(ids for ids in found if ids)
