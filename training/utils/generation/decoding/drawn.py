"""The responses of a rollout while they are drawn: tokens, log-probabilities, and which rows are over. With the texts
that end a response (stop strings), and token sequences that it never completes (bad words).

B sequences, of which A are still active; R response tokens, t of them between two looks, K tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout import Rollout
from training.utils.generation.decoding.sampling import draw, further_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.utils.contracts.rollout_engine import Decode, RolloutRequest, Sampling
    from training.utils.generation.decoding.decoding import Decoding

# Decoders write this for an incomplete character.
_BROKEN_CHARACTER = "\ufffd"


class StopStrings:
    """Holds the texts, and which tokens can complete one: only for those is the whole response decoded."""

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self._texts = tuple(texts)
        self._decode = decode
        self._last_characters = {text[-1] for text in texts}
        self._can_complete: dict[int, bool] = {}

    def can_complete(self, token_id: int) -> bool:
        """False if no stop string can end within this token's text."""
        if token_id not in self._can_complete:
            # Twice, because some decoders drop the space before the first token of a text.
            written = self._decode([token_id, token_id])
            self._can_complete[token_id] = _BROKEN_CHARACTER in written or any(
                character in written for character in self._last_characters
            )
        return self._can_complete[token_id]

    def completed(self, response_ids: Sequence[int]) -> bool:
        """True if the response's text contains a stop string. Call it after each token, so that the last token is the
        one that completed it."""
        if not self.can_complete(response_ids[-1]):
            return False
        written = self._decode(response_ids)
        return any(text in written for text in self._texts)


def stop_strings(sampling: Sampling, decode: Decode | None) -> StopStrings | None:
    """The stop strings of `sampling`; None if there are none."""
    if not sampling.stop:
        return None
    assert decode is not None, "stop strings need a tokenizer's decode"
    return StopStrings(sampling.stop, decode)


def first_completed(stop: StopStrings, response_ids: Sequence[int]) -> int | None:
    """Return the number of tokens up to and including the one that completes a text; None if none does."""
    lengths = (length for length in range(1, len(response_ids) + 1) if stop.completed(response_ids[:length]))
    return next(lengths, None)


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
        self.prompt_ends_BK = padded_BP[:, padded_BP.shape[1] - reach :]

    def recent(self, response_ids_BR: torch.Tensor, rows_A: torch.Tensor) -> torch.Tensor:
        """Return int64 [A, K], the last tokens of rows `rows_A`, whose responses so far are `response_ids_BR`."""
        reach = self._before_WK.shape[1]
        recent_BK = response_ids_BR[:, max(0, response_ids_BR.shape[1] - reach) :]
        recent_AK = torch.cat([self.prompt_ends_BK[rows_A], recent_BK[rows_A]], dim=1)
        return recent_AK[:, recent_AK.shape[1] - reach :]

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
                    f"--bad_words expects strings other than the token that ends a response, got '{word}'; remove it, "
                    "because without that token no response could end before --max_answer_seq_len"
                )
            found[ids] = None
    return tuple(ids for ids in found if ids)


class DrawnResponses:
    """The responses of a rollout so far. Which rows are over is known after each look, of several tokens: what a row
    draws beyond its end is cut off at the end."""

    def __init__(self, request: RolloutRequest, stop: StopStrings | None) -> None:
        sampling, device = request.sampling, request.prompt_ids_BP.device
        self._sampling, self._stop, self._ends = sampling, stop, sampling.end_token_ids
        self._prompt_ids_BP, self._prompt_mask_BP = request.repeated()
        count, most = len(self._prompt_ids_BP), sampling.max_new_tokens
        self.uniform_BR = uniform_streams(request.seeds, most, count).to(device)
        self._ids_BR = torch.full(self.uniform_BR.shape, sampling.pad_token_id, device=device)
        self._logprobs_BR = torch.zeros(self.uniform_BR.shape, device=device)
        self.bad_words = None
        if sampling.bad_words:
            self.bad_words = BadWords(sampling.bad_words, self._prompt_ids_BP, self._prompt_mask_BP)
        self._ended, self._lengths = [False] * count, [most] * count
        self._texts: list[list[int]] = [[] for _ in range(count if stop else 0)]

    def advance(
        self, decoding: Decoding, logits_AV: torch.Tensor, start: int, end: int
    ) -> tuple[torch.Tensor, list[bool]]:
        """Draw the tokens from `start` to `end` of the active rows, the first by `logits_AV`; return the last, and
        which rows are over. The host waits once, at the end."""
        rows_A, recent_AK = decoding.rows_A, None
        if self.bad_words is not None:
            recent_AK = self.bad_words.recent(self._ids_BR[:, :start], rows_A)

        def next_logits(place: int, token_A: torch.Tensor | None) -> torch.Tensor:
            return logits_AV if token_A is None else decoding.step(token_A)

        uniform_At = self.uniform_BR[rows_A, start:end]
        token_At, logprob_At = draw_several(
            uniform_At, self._sampling, next_logits, self.bad_words, recent_AK=recent_AK
        )
        self._ids_BR[rows_A, start:end] = token_At
        self._logprobs_BR[rows_A, start:end] = logprob_At
        read = torch.cat([rows_A.unsqueeze(1), token_At], dim=1).tolist()
        return token_At[:, -1], [self._is_over(row, ids, start) for row, *ids in read]

    def _is_over(self, row: int, ids: list[int], start: int) -> bool:
        """Note the end of a row among `ids`, its tokens from `start` on, if it comes there."""
        if self._ended[row]:  # before, and the row is still there
            return True
        for place, token in enumerate(ids, start + 1):
            if self._stop is not None:
                self._texts[row].append(token)
            if token in self._ends or (self._stop and self._stop.completed(self._texts[row])):
                self._ended[row], self._lengths[row] = True, place
                return True
        return False

    def rollout(self) -> Rollout:
        """Return what was drawn, without what is beyond an end."""
        width, device = max(self._lengths), self._ids_BR.device
        lengths_B = torch.tensor(self._lengths, device=device)
        beyond_BR = torch.arange(width, device=device) >= lengths_B.unsqueeze(1)
        return Rollout(
            prompt_ids_BP=self._prompt_ids_BP,
            prompt_mask_BP=self._prompt_mask_BP,
            response_ids_BR=self._ids_BR[:, :width].masked_fill(beyond_BR, self._sampling.pad_token_id),
            response_lengths_B=lengths_B,
            sampled_logprobs_BR=self._logprobs_BR[:, :width].masked_fill(beyond_BR, 0.0),
            ended_B=torch.tensor(self._ended, device=device),
        )


def draw_several(
    uniform_At: torch.Tensor,
    sampling: Sampling,
    next_logits: Callable[[int, torch.Tensor | None], torch.Tensor],
    bad_words: BadWords | None,
    *,
    recent_AK: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and log-probabilities, [A, t] each, without waiting for the device.

    next_logits: the number of a token (from 0) and the tokens before it, None before the first -> logits [A, V].
    recent_AK: the last tokens before the first, where there are bad words.
    """
    again_KAt = further_numbers(uniform_At, sampling)
    token_A, found = None, list[tuple[torch.Tensor, torch.Tensor]]()
    for place in range(uniform_At.shape[1]):
        logits_AV, banned_AV = next_logits(place, token_A), None
        if bad_words is not None and recent_AK is not None:
            recent_AK = recent_AK if token_A is None else bad_words.after(recent_AK, token_A)
            banned_AV = bad_words.banned(recent_AK, logits_AV.shape[1])
        again_KA = None if again_KAt is None else again_KAt[..., place]
        token_A, logprob_A = draw(logits_AV, uniform_At[:, place], sampling, banned_AV, again_KA=again_KA)
        found.append((token_A, logprob_A))
    tokens, logprobs = zip(*found, strict=True)
    return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)


def uniform_streams(seeds: Sequence[int], tokens: int, count: int) -> torch.Tensor:
    """float64 [B, tokens] in [0, 1): each row from its own seed, on the CPU, so that all devices draw the same."""
    assert len(seeds) == count, f"{count} sequences need {count} seeds, got {len(seeds)}"
    streams = [torch.rand(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(streams)
