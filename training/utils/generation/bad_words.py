"""Bad words: token sequences that a response never completes.

The last token of a sequence cannot be drawn when the preceding tokens, of prompt and response, match the rest. Other
tokenizations of the same text are not detected. A rows, K tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from training.utils.run.errors import ThreestepError

_NOTHING = -1  # not a token id


class BadWords:
    """The sequences, and the end of each prompt, where a sequence may have begun."""

    def __init__(
        self, words: Sequence[Sequence[int]], prompt_ids_BP: torch.Tensor, prompt_mask_BP: torch.Tensor
    ) -> None:
        self._last_ids = [word[-1] for word in words if len(word) == 1]
        self._longer = [
            (torch.tensor(word[:-1], device=prompt_ids_BP.device), word[-1]) for word in words if len(word) > 1
        ]
        self._reach = max(len(word) for word in words) - 1
        known_BP = prompt_ids_BP.masked_fill(~prompt_mask_BP, _NOTHING)
        padded_BP = torch.nn.functional.pad(known_BP, (self._reach, 0), value=_NOTHING)
        self._prompt_ends_BK = padded_BP[:, padded_BP.shape[1] - self._reach :]

    def banned(self, response_ids_BR: torch.Tensor, rows_A: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return bool [A, V], True for each token that would complete a sequence in rows `rows_A` after the responses
        `response_ids_BR` so far."""
        banned_AV = torch.zeros(len(rows_A), vocabulary, dtype=torch.bool, device=rows_A.device)
        banned_AV[:, self._last_ids] = True
        if self._longer:
            recent_BK = response_ids_BR[:, max(0, response_ids_BR.shape[1] - self._reach) :]
            recent_AK = torch.cat([self._prompt_ends_BK[rows_A], recent_BK[rows_A]], dim=1)
            for before_k, last_id in self._longer:
                banned_AV[:, last_id] |= (recent_AK[:, -len(before_k) :] == before_k).all(dim=1)
        return banned_AV


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
