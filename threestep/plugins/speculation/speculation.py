"""Rollouts whose tokens are guessed and verified several at a time.

A token is drawn by inverting its distribution at a number that its sequence's seed and its place alone decide. A head
trained beside the model draws its guesses at the same numbers (`ngrams` needs no head); the model then computes the
guessed tokens in one forward, and draws at each of their places what it would have drawn anyway. A guess that is this
very token has saved a forward, and the first that is not is replaced by it: whatever is guessed, the tokens are those
of a rollout without guesses (up to rounding).

B prompts with n samples each are A active rows; P prompt tokens, K guesses, Q tokens verified at once: 1 behind the
prompts, then at most K + 1. R response tokens, H hidden size, V vocabulary, S of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.speculation.frequent import FewLogits, vocabulary_of
from threestep.plugins.speculation.kept_rows import KeptRows
from threestep.plugins.speculation.ngrams import NOTHING, NgramRows
from threestep.plugins.speculation.pace import RoundPace
from training.utils.generation.decoding.cache import compacted, moves_when_leaving
from training.utils.generation.decoding.drawn import BadWords, DrawnResponses
from training.utils.generation.decoding.sampling import draw

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.guests import LentHead
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
    from training.utils.generation.decoding.drawn import StopStrings


@dataclass(frozen=True)
class Guesses:
    """Settings of guessing. count: K, 1 or more. head: None guesses by n-grams. among_S: int64, in ascending order,
    the tokens among which a head guesses; None: among all. pace: which rounds guess; by default all. prefill_tokens:
    see `KeptRows`."""

    count: int
    head: LentHead | None = None
    among_S: torch.Tensor | None = None
    pace: RoundPace = field(default_factory=RoundPace)
    prefill_tokens: int | None = None


@dataclass
class GuessCounts:
    """Counts of the rollouts so far. forwards: each counts for each of its rows. tokens: drawn by them. guesses,
    accepted: tokens that were guessed, and those of them that the model drew too."""

    forwards: int = 0
    tokens: int = 0
    guesses: int = 0
    accepted: int = 0

    def add(self, over: list[bool], guess_AK: torch.Tensor, tokens: int) -> None:
        """Add a forward of the rows of `over`."""
        self.forwards += len(over)
        self.tokens += tokens
        self.guesses += int((guess_AK != NOTHING).sum())
        self.accepted += tokens - len(over)

    def figures(self) -> dict[str, float]:
        """Metrics of the rollouts; {} where nothing was guessed."""
        if not self.guesses:
            return {}
        return {
            "rollout/guesses_accepted": self.accepted / self.guesses,
            "rollout/tokens_per_forward": self.tokens / self.forwards,
        }


def drawn_by_guesses(
    model: PreTrainedModel, how: Guesses, request: RolloutRequest, stop: StopStrings | None, *, counts: GuessCounts
) -> Rollout:
    """Return the rollout that `model` draws without guesses. counts: are added to.

    ValueError if a layer sees but the last tokens, or holds something else than keys and values.
    """
    drawn = _GuessedResponses(request, stop, beyond=how.count + 1)
    rows, guesser, states_AQH = _prefilled(model, how, request)
    rows_A = torch.arange(len(states_AQH), device=states_AQH.device)
    starts_A, guess_AK = torch.zeros_like(rows_A), rows_A.new_empty(len(rows_A), 0)
    draws_of = partial(_Draws, drawn, request.sampling, vocabulary_of(model))
    is_prompt = True
    while True:
        draws = draws_of(rows_A, starts_A=starts_A)
        token_AQ, logprob_AQ, fresh_A = _verified(model, states_AQH, guess_AK, draws)
        most = int(fresh_A.max())
        over = drawn.take(rows_A, starts_A, token_AQ, logprob_AQ, fresh_A=fresh_A)
        tokens = int(fresh_A.sum())
        counts.add(over, guess_AK, tokens)
        how.pace.end(tokens)
        if all(over):
            return drawn.rollout()
        if not is_prompt:
            rows.keep(fresh_A, most)
        is_prompt, starts_A = False, starts_A + fresh_A
        token_AQ, states_AQH = token_AQ[:, :most], states_AQH[:, :most]
        if any(over):
            moves = moves_when_leaving(over, rows_A.device)
            rows.leave(moves)
            guesser.leave(moves)
            held = (rows_A, starts_A, fresh_A, token_AQ, states_AQH)
            rows_A, starts_A, fresh_A, token_AQ, states_AQH = (compacted(part, moves) for part in held)
        if how.pace.begin(len(rows_A)):
            guess_AK = guesser.guess(token_AQ, fresh_A, states_AQH, draws_of(rows_A, starts_A=starts_A))
        else:
            guesser.skip(token_AQ, fresh_A)
            guess_AK = token_AQ[:, :0]
        given_AQ = torch.cat([token_AQ.gather(1, fresh_A.unsqueeze(1) - 1), guess_AK.clamp(min=0)], dim=1)
        states_AQH = rows.give(given_AQ.shape[1], input_ids=given_AQ)


def _prefilled(
    model: PreTrainedModel, how: Guesses, request: RolloutRequest
) -> tuple[KeptRows, _HeadRows | NgramRows, torch.Tensor]:
    """Compute each prompt once, then give each sample a row; return the rows of the model, what guesses, and the states
    [A, 1, H] that predict the first tokens."""
    ids_BP, mask_BP = request.prompt_ids_BP, request.prompt_mask_BP
    most_columns = ids_BP.shape[1] + request.sampling.max_new_tokens * (how.count + 1)
    position_ids_BP = (mask_BP.long().cumsum(-1) - 1).clamp(min=0)
    trunk: Any = model.base_model
    rows = KeptRows(trunk, mask_BP, most_columns, prefill_tokens=how.prefill_tokens)
    states_BPH = rows.prefill(position_ids_BP, input_ids=ids_BP)
    order_A = torch.arange(len(ids_BP), device=ids_BP.device).repeat_interleave(request.samples_per_prompt)
    guesser: _HeadRows | NgramRows
    if how.head is None:
        guesser = NgramRows(request, how.count)
    else:
        guesser = _HeadRows(model, how, mask_BP, most_columns)
        guesser.prefill(ids_BP, position_ids_BP, states_BPH)
        guesser.repeat(order_A)
    if request.samples_per_prompt > 1:
        rows.repeat(order_A)
    return rows, guesser, states_BPH[order_A, -1:]


def _verified(
    model: PreTrainedModel, states_AQH: torch.Tensor, guess_AK: torch.Tensor, draws: _Draws
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw each row's next tokens up to the first that was not guessed; return tokens and log-probabilities [A, Q], of
    which the first `fresh_A` count, and `fresh_A`."""
    # Of all places at once: to read the output layer's weights again, for the rows whose guess was right, costs more.
    logits_AQV = FewLogits(model)(states_AQH)
    token_AQ = guess_AK.new_zeros(states_AQH.shape[:2])
    logprob_AQ = torch.zeros(token_AQ.shape, device=token_AQ.device)
    fresh_A = guess_AK.new_zeros(len(token_AQ))
    going = torch.arange(len(token_AQ), device=token_AQ.device)
    for place in range(token_AQ.shape[1]):
        token, logprob = draws.next(logits_AQV[going, place])
        token_AQ[going, place], logprob_AQ[going, place], fresh_A[going] = token, logprob, place + 1
        if place < guess_AK.shape[1]:
            stay = torch.nonzero(token == guess_AK[going, place]).flatten()
            if not len(stay):
                break
            going = going[stay]
            draws.select(stay)
    return token_AQ, logprob_AQ, fresh_A


class _HeadRows:
    """The rows of a head's first module. An entry stands for a token: its embedding, and the model's state at the token
    before. Of the tokens that it guesses itself, where the model has no state yet, it takes its own state instead, and
    takes these entries back.

    Of several tokens at once only the last gets an entry: the states have seen the others, and guesses are right as
    often (docs/lab_book.md), for half of the work."""

    def __init__(self, model: PreTrainedModel, how: Guesses, mask_BP: torch.Tensor, most_columns: int) -> None:
        assert how.head is not None
        self._module: Any = how.head.depths[0]
        self._embeddings: Any = model.get_input_embeddings()
        self._count, self._logits = how.count, FewLogits(model, how.among_S)
        # A prompt's first token has no entry.
        seen_BP = mask_BP & torch.nn.functional.pad(mask_BP[:, :-1], (1, 0), value=False)
        self._rows = KeptRows(self._module.trunk, seen_BP, most_columns, prefill_tokens=how.prefill_tokens)
        self.repeat, self.leave = self._rows.repeat, self._rows.leave

    def prefill(self, ids_BP: torch.Tensor, position_ids_BP: torch.Tensor, states_BPH: torch.Tensor) -> None:
        before_BPH = torch.cat([states_BPH[:, :1], states_BPH[:, :-1]], dim=1)
        self._rows.prefill(position_ids_BP, inputs_embeds=self._entries(ids_BP, before_BPH))

    def guess(
        self, token_AQ: torch.Tensor, fresh_A: torch.Tensor, states_AQH: torch.Tensor, draws: _Draws
    ) -> torch.Tensor:
        """Return the next tokens [A, K] of each row. token_AQ: of which the first `fresh_A` are new, predicted by
        states_AQH. draws: of the tokens to be guessed."""
        rows_A = torch.arange(len(fresh_A), device=fresh_A.device)
        token_A, state_AH = token_AQ[rows_A, fresh_A - 1], states_AQH[rows_A, fresh_A - 1]
        self._rows.skip(fresh_A - 1)
        found = list[torch.Tensor]()
        for _ in range(self._count):
            state_AH = self._rows.give(1, inputs_embeds=self._entries(token_A, state_AH).unsqueeze(1))[:, 0]
            self._rows.keep_all()
            token_A, _ = draws.next(self._logits(state_AH), self._logits.among_S)
            found.append(token_A)
        self._rows.take_back(self._count - 1)
        return torch.stack(found, dim=1)

    def skip(self, token_AQ: torch.Tensor, fresh_A: torch.Tensor) -> None:
        """Guess nothing behind these tokens, which get no entries."""
        self._rows.skip(fresh_A)

    def _entries(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self._module.joined(self._embeddings(tokens), before)


class _GuessedResponses(DrawnResponses):
    """Responses of which each row is given several tokens at a time, from a place of its own on."""

    def __init__(self, request: RolloutRequest, stop: StopStrings | None, beyond: int) -> None:
        """beyond: tokens that a row may be given after the last that it can keep."""
        super().__init__(request, stop)
        pad = partial(torch.nn.functional.pad, pad=(0, beyond))
        self.uniform_BR, self._logprobs_BR = pad(self.uniform_BR), pad(self._logprobs_BR)
        self._ids_BR = pad(self._ids_BR, value=self._sampling.pad_token_id)

    def recent_at(self, rows_A: torch.Tensor, starts_A: torch.Tensor) -> torch.Tensor | None:
        """Return the tokens before each row's own place that banned words look at; None where there are none."""
        if self.bad_words is None:
            return None
        ends_AK = self.bad_words.prompt_ends_BK[rows_A]
        held_AL = torch.cat([ends_AK, self._ids_BR[rows_A]], dim=1)
        return held_AL.gather(1, starts_A.unsqueeze(1) + torch.arange(ends_AK.shape[1], device=rows_A.device))

    def take(
        self,
        rows_A: torch.Tensor,
        starts_A: torch.Tensor,
        token_AQ: torch.Tensor,
        logprob_AQ: torch.Tensor,
        *,
        fresh_A: torch.Tensor,
    ) -> list[bool]:
        """Give each row, from its own place `starts_A` on, the first `fresh_A` of its tokens; return which are over.
        The others are written too, where the row's next tokens will be."""
        most = self._sampling.max_new_tokens
        places_AQ = starts_A.unsqueeze(1) + torch.arange(token_AQ.shape[1], device=rows_A.device)
        self._ids_BR[rows_A.unsqueeze(1), places_AQ] = token_AQ
        self._logprobs_BR[rows_A.unsqueeze(1), places_AQ] = logprob_AQ
        read = torch.cat([torch.stack([rows_A, starts_A, fresh_A], dim=1), token_AQ], dim=1).tolist()
        return [
            self._is_over(row, ids[: min(fresh, most - start)], start) or start + fresh >= most
            for row, start, fresh, *ids in read
        ]


class _Draws:
    """Draws of each row's next tokens, one by one, by the numbers of their places."""

    def __init__(
        self,
        drawn: _GuessedResponses,
        sampling: Sampling,
        vocabulary: int,
        rows_A: torch.Tensor,
        *,
        starts_A: torch.Tensor,
    ) -> None:
        """starts_A: the place of each row's next token."""
        self._sampling, self._vocabulary = sampling, vocabulary
        self._rows_A, self._places_A = rows_A, starts_A
        self._uniform_BR, self._bad_words = drawn.uniform_BR, drawn.bad_words
        self._recent_AK = drawn.recent_at(rows_A, starts_A)  # what banned words look at

    def next(self, logits_AS: torch.Tensor, among_S: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's next token and its log-probability. among_S: the tokens whose logits these are."""
        banned_AS = None
        if self._bad_words is not None and self._recent_AK is not None:
            banned_AS = self._bad_words.banned(self._recent_AK, self._vocabulary)
            banned_AS = banned_AS if among_S is None else banned_AS[:, among_S]
        uniform_A = self._uniform_BR[self._rows_A, self._places_A]
        token_A, logprob_A = draw(logits_AS, uniform_A, self._sampling, banned_AS)
        token_A = token_A if among_S is None else among_S[token_A]
        self._places_A = self._places_A + 1
        if self._recent_AK is not None:
            self._recent_AK = BadWords.after(self._recent_AK, token_A)
        return token_A, logprob_A

    def select(self, index: torch.Tensor) -> None:
        """Go on with these rows alone."""
        self._rows_A, self._places_A = self._rows_A[index], self._places_A[index]
        self._recent_AK = None if self._recent_AK is None else self._recent_AK[index]
