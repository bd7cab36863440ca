"""Rollouts whose tokens are guessed by a head for multi-token prediction and verified several at a time.

A token is drawn by inverting its distribution at a number that its sequence's seed and its place alone decide. The head
draws its guesses at the same numbers; the model then computes the guessed tokens in one forward, and draws at each of
their places what it would have drawn anyway. A guess that is this very token has saved a forward, and the first that is
not is replaced by it: whatever the head guesses, the tokens are those of a rollout without it (up to rounding).

B prompts with n samples each are A active rows; P prompt tokens, K guesses, Q tokens verified at once: 1 behind the
prompts, then K + 1. R response tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from training.utils.generation.bad_words import BadWords
from training.utils.generation.base import RolloutRequest
from training.utils.generation.cache import compacted, moves_when_leaving
from training.utils.generation.drawn import DrawnResponses
from training.utils.generation.kept_rows import KeptRows
from training.utils.generation.records import Rollout
from training.utils.generation.sampling import draw
from training.utils.generation.stop_strings import StopStrings
from training.utils.mtp.head import MtpHead


@dataclass
class GuessCounts:
    """Of rollouts so far. forwards: each counts for each of its rows. tokens: drawn by them. guesses, accepted: tokens
    that were guessed, and those of them that the model drew too."""

    forwards: int = 0
    tokens: int = 0
    guesses: int = 0
    accepted: int = 0

    def figures(self) -> dict[str, float]:
        """Metrics of the rollouts; {} where nothing was guessed."""
        if not self.guesses:
            return {}
        return {
            "rollout/guesses_accepted": self.accepted / self.guesses,
            "rollout/tokens_per_forward": self.tokens / self.forwards,
        }


def drawn_by_guesses(
    model: PreTrainedModel,
    head: MtpHead,
    guesses: int,
    request: RolloutRequest,
    stop: StopStrings | None,
    counts: GuessCounts,
) -> Rollout:
    """Return the rollout that `model` draws without a head. guesses: K, 1 or more. counts: are added to.

    ValueError if a layer sees but the last tokens, or holds something else than keys and values.
    """
    drawn = DrawnResponses(request, stop, beyond=guesses + 1)
    rows, head_rows, states_AQH = _prefilled(model, head, guesses, request)
    rows_A = torch.arange(len(states_AQH), device=states_AQH.device)
    starts_A, guess_AK = torch.zeros_like(rows_A), rows_A.new_empty(len(rows_A), 0)
    draws = _Draws(drawn, request, rows_A, starts_A)
    while True:
        token_AQ, logprob_AQ = draws.all_of(_logits(model, states_AQH))
        fresh_A = 1 + (token_AQ[:, :-1] == guess_AK).cumprod(dim=1).sum(dim=1)
        most = int(fresh_A.max())
        over = drawn.take(rows_A, starts_A, token_AQ, logprob_AQ, fresh_A)
        counts.forwards += len(over)
        counts.tokens += int(fresh_A.sum())
        counts.guesses += guess_AK.numel()
        counts.accepted += int(fresh_A.sum()) - len(over)
        if guess_AK.numel():
            rows.keep(fresh_A, most)
        if all(over):
            return drawn.rollout()
        starts_A = starts_A + fresh_A
        token_AQ, states_AQH = token_AQ[:, :most], states_AQH[:, :most]
        if any(over):
            moves = moves_when_leaving(over, rows_A.device)
            rows.leave(moves)
            head_rows.leave(moves)
            held = (rows_A, starts_A, fresh_A, token_AQ, states_AQH)
            rows_A, starts_A, fresh_A, token_AQ, states_AQH = (compacted(part, moves) for part in held)
        draws = _Draws(drawn, request, rows_A, starts_A)
        guess_AK = head_rows.guess(token_AQ, states_AQH, fresh_A, draws, guesses)
        last_A1 = token_AQ.gather(1, fresh_A.unsqueeze(1) - 1)
        states_AQH = rows.give(guesses + 1, input_ids=torch.cat([last_A1, guess_AK], dim=1))


def _prefilled(
    model: PreTrainedModel, head: MtpHead, guesses: int, request: RolloutRequest
) -> tuple[KeptRows, _HeadRows, torch.Tensor]:
    """Compute each prompt once, then give each sample a row; return the rows of the model and of the head, and the
    states [A, 1, H] that predict the first tokens."""
    ids_BP, mask_BP = request.prompt_ids_BP, request.prompt_mask_BP
    most_columns = ids_BP.shape[1] + request.sampling.max_new_tokens * (guesses + 1)
    position_ids_BP = (mask_BP.long().cumsum(-1) - 1).clamp(min=0)
    rows = KeptRows(model.base_model, mask_BP, most_columns)  # type: ignore[arg-type]
    states_BPH = rows.prefill(position_ids_BP, input_ids=ids_BP)
    head_rows = _HeadRows(model, head, mask_BP, most_columns)
    head_rows.prefill(ids_BP, position_ids_BP, states_BPH)
    order_A = torch.arange(len(ids_BP), device=ids_BP.device).repeat_interleave(request.samples_per_prompt)
    if request.samples_per_prompt > 1:
        rows.repeat(order_A)
        head_rows.repeat(order_A)
    return rows, head_rows, states_BPH[order_A, -1:]


def _logits(model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    layer: Any = model.get_output_embeddings()
    return layer(states).float()


class _HeadRows:
    """The rows of a head's first module. An entry stands for a token: its embedding, and the model's state at the token
    before. Of the tokens that it guesses itself, where the model has no state yet, it takes its own state instead, and
    takes these entries back."""

    def __init__(self, model: PreTrainedModel, head: MtpHead, mask_BP: torch.Tensor, most_columns: int) -> None:
        self._model = model
        self._module: Any = head.depths[0]
        # A prompt's first token has no entry.
        seen_BP = mask_BP & torch.nn.functional.pad(mask_BP[:, :-1], (1, 0), value=False)
        self._rows = KeptRows(self._module.trunk, seen_BP, most_columns)
        self.repeat, self.leave = self._rows.repeat, self._rows.leave

    def prefill(self, ids_BP: torch.Tensor, position_ids_BP: torch.Tensor, states_BPH: torch.Tensor) -> None:
        before_BPH = torch.cat([states_BPH[:, :1], states_BPH[:, :-1]], dim=1)
        self._rows.prefill(position_ids_BP, inputs_embeds=self._entries(ids_BP, before_BPH))

    def guess(
        self, token_AQ: torch.Tensor, states_AQH: torch.Tensor, fresh_A: torch.Tensor, draws: _Draws, guesses: int
    ) -> torch.Tensor:
        """Return the next tokens [A, K] of each row, as the head guesses them. token_AQ: of which the first `fresh_A`
        are new, predicted by states_AQH."""
        own_AQH = self._rows.give(token_AQ.shape[1], inputs_embeds=self._entries(token_AQ, states_AQH))
        self._rows.keep(fresh_A, token_AQ.shape[1])
        state_AH = own_AQH[torch.arange(len(fresh_A), device=fresh_A.device), fresh_A - 1]
        found = [draws.next(_logits(self._model, state_AH))]
        for _ in range(guesses - 1):
            entry_A1H = self._entries(found[-1].unsqueeze(1), state_AH.unsqueeze(1))
            state_AH = self._rows.give(1, inputs_embeds=entry_A1H)[:, 0]
            self._rows.keep_all()
            found.append(draws.next(_logits(self._model, state_AH)))
        self._rows.take_back(guesses - 1)
        return torch.stack(found, dim=1)

    def _entries(self, token_AQ: torch.Tensor, before_AQH: torch.Tensor) -> torch.Tensor:
        embeddings: Any = self._model.get_input_embeddings()
        return self._module.joined(embeddings(token_AQ), before_AQH)


class _Draws:
    """Draws of each row's next tokens, by the numbers of their places: first the guesses, one by one, then the model's
    own at the same places."""

    def __init__(
        self, drawn: DrawnResponses, request: RolloutRequest, rows_A: torch.Tensor, starts_A: torch.Tensor
    ) -> None:
        self._sampling, self._rows_A, self._starts_A = request.sampling, rows_A, starts_A
        self._uniform_BR, self._bad_words = drawn.uniform_BR, drawn.bad_words
        # What banned words look at, at each place.
        self._recent = [drawn.recent_at(rows_A, starts_A)]

    def next(self, logits_AV: torch.Tensor) -> torch.Tensor:
        """Draw the guess behind the last guess."""
        token_A, _ = self._at(len(self._recent) - 1, logits_AV)
        recent_AK = self._recent[-1]
        self._recent.append(None if recent_AK is None else BadWords.after(recent_AK, token_A))
        return token_A

    def all_of(self, logits_AQV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw at every place, as if all guesses before it were right; return tokens and log-probabilities [A, Q]."""
        found = [self._at(place, logits_AQV[:, place]) for place in range(logits_AQV.shape[1])]
        return torch.stack([token_A for token_A, _ in found], dim=1), torch.stack([part for _, part in found], dim=1)

    def _at(self, place: int, logits_AV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        recent_AK, banned_AV = self._recent[place], None
        if self._bad_words is not None and recent_AK is not None:
            banned_AV = self._bad_words.banned(recent_AK, logits_AV.shape[1])
        uniform_A = self._uniform_BR[self._rows_A, self._starts_A + place]
        return draw(logits_AV, uniform_A, self._sampling, banned_AV)
