"""The result of a rollout engine.

B sequences (of this rank), P prompt tokens, R response tokens (of the longest response in the batch); of a mixture of
experts L layers and K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, join

if TYPE_CHECKING:
    from training.utils.contracts.documents import MediaSpan


@dataclass(frozen=True)
class ConversationRecord:
    """The outcome of a conversation of several turns.

    turns: that the model drew.
    cut: the limit that ended it, one of CUTS; None where it came to its own end.
    figures: of its environment, by name, summed over the turns.
    forks: how often it went on in another sequence, as the chat template had rewritten its history.
    """

    turns: int
    cut: str | None
    figures: Mapping[str, float]
    forks: int = 0


@dataclass(frozen=True)
class Conversations:
    """The work of environments on responses: inserted tokens, forks and rewards.

    records: of each response.
    inserted_BR: bool, True on what an environment said between two turns.
    fork_begins_BR: bool, True on the first token of each fork: from there on the response is another sequence, which
        begins with the history as the chat template writes it by then, all of it inserted.
    turn_rewards_BR: float32, the environment's reward of each turn at its last token, 0 elsewhere.
    """

    records: tuple[ConversationRecord, ...]
    inserted_BR: torch.Tensor
    fork_begins_BR: torch.Tensor
    turn_rewards_BR: torch.Tensor


@dataclass(frozen=True)
class FormedResponses:
    """Responses in a form (`contracts.drawing`).

    inserted_BR: bool, True on tokens that were put there.
    positions_B: int64, the tokens of a response of which, of parts beside each other, the longest counts alone.
    """

    inserted_BR: torch.Tensor
    positions_B: torch.Tensor


@dataclass(frozen=True)
class DrawnExperts:
    """The experts by which a rollout computed each of its tokens. A response's last token, which no engine need read,
    has none; nor has a layer without experts any that count.

    prompt_BPLK, response_BRLK: beside the ids of the rollout, padded as they are.
    """

    prompt_BPLK: torch.Tensor
    response_BRLK: torch.Tensor

    def of_sequence(self, index: int, prompt_mask_P: torch.Tensor, length: int) -> torch.Tensor:
        """int16 [T, L, K] of a prompt with its response of `length` tokens, on the CPU."""
        prompt_TLK = self.prompt_BPLK[index].cpu()[prompt_mask_P]
        return torch.cat([prompt_TLK, self.response_BRLK[index, :length].cpu()])


# What ends a conversation early: the length of a response, the number of turns, that of calls, and the time.
CUTS = ("tokens", "turns", "calls", "seconds")
FORK_LINE = "\n--- fork: the chat template rewrites the history ---\n"
# Who says a part of a response, as samples have it.
MODEL, ENVIRONMENT = "model", "environment"
FAILURES = "environment_failures"  # a figure of a conversation: 1 where its environment failed


class Response(NamedTuple):
    """ids, logprobs: of its tokens, 1 or more. ended: by itself, False where it was cut."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    ended: bool


class DrawnTokens(NamedTuple):
    """Those of each response one after the other, in the order of its text: what is learned from. R of them at most.

    mask_BR: bool, True on them. lengths_B: int64, their number. logprobs_BR: float32, `sampled_logprobs_BR` of them.
    turn_rewards_BR: float32, those of the rollout; None where it has none.
    """

    mask_BR: torch.Tensor
    lengths_B: torch.Tensor
    logprobs_BR: torch.Tensor
    turn_rewards_BR: torch.Tensor | None = None


@dataclass(frozen=True)
class Rollout:
    """Prompts and the responses sampled for them.

    prompt_ids_BP: int64, left-padded; prompt_mask_BP: bool.
    response_ids_BR: int64; includes the end-of-conversation token; pad after it.
    response_lengths_B: int64, from 1 to R.
    sampled_logprobs_BR: float32, log p of each drawn token at the sampling temperature, before bad words, top-k, top-p
        and min-p remove tokens; 0 outside the response.
    ended_B: bool, True if the end-of-conversation token, or another end token, was drawn or a stop string completed;
        False if cut.
    inserted: of responses in a form, or of several turns; None where all are one turn in one piece.
    seconds: time to draw the responses on this rank, prompts included.
    media: those of the prompt of each sequence, counted from its first token; None where no prompt has any.
    experts: of a mixture of experts, where its choices are recorded.
    """

    prompt_ids_BP: torch.Tensor
    prompt_mask_BP: torch.Tensor
    response_ids_BR: torch.Tensor
    response_lengths_B: torch.Tensor
    sampled_logprobs_BR: torch.Tensor
    ended_B: torch.Tensor
    inserted: FormedResponses | Conversations | None = None
    seconds: float = 0.0
    media: tuple[tuple[MediaSpan, ...], ...] | None = None
    experts: DrawnExperts | None = None

    @classmethod
    def of_responses(
        cls,
        prompts: tuple[torch.Tensor, torch.Tensor],
        responses: Sequence[Response],
        pad_token_id: int,
        seconds: float = 0.0,
    ) -> Rollout:
        """Return the responses as a rollout. prompts: ids and mask of each, as `RolloutRequest.repeated` has them."""
        device = prompts[0].device
        lengths_B = torch.tensor([len(each.ids) for each in responses], device=device)
        return cls(
            *prompts,
            response_ids_BR=right_padded([each.ids for each in responses], pad_token_id, torch.int64).to(device),
            response_lengths_B=lengths_B,
            sampled_logprobs_BR=right_padded([each.logprobs for each in responses], 0, torch.float32).to(device),
            ended_B=torch.tensor([each.ended for each in responses], device=device),
            seconds=seconds,
        )

    @property
    def formed(self) -> FormedResponses | None:
        return self.inserted if isinstance(self.inserted, FormedResponses) else None

    @property
    def conversations(self) -> Conversations | None:
        return self.inserted if isinstance(self.inserted, Conversations) else None

    @property
    def records(self) -> tuple[ConversationRecord, ...]:
        """Records of the conversations; empty without any."""
        return () if self.conversations is None else self.conversations.records

    @property
    def inserted_BR(self) -> torch.Tensor | None:
        """bool, True on tokens of the response that no model drew: nothing learns them. None where there are none."""
        return None if self.inserted is None else self.inserted.inserted_BR

    @cached_property
    def response_mask_BR(self) -> torch.Tensor:
        """bool, True on response tokens; from lengths, never from ids."""
        columns_R = torch.arange(self.response_ids_BR.shape[1], device=self.response_lengths_B.device)
        return columns_R < self.response_lengths_B.unsqueeze(1)

    @cached_property
    def drawn(self) -> DrawnTokens:
        """The tokens that were drawn."""
        if self.inserted_BR is None:
            return DrawnTokens(self.response_mask_BR, self.response_lengths_B, self.sampled_logprobs_BR)
        is_drawn_BR = self.response_mask_BR & ~self.inserted_BR
        lengths_B = is_drawn_BR.sum(dim=1)
        mask_BR = torch.arange(int(lengths_B.max()), device=lengths_B.device) < lengths_B.unsqueeze(1)

        def compressed(values_BR: torch.Tensor) -> torch.Tensor:
            nothing_BR = torch.zeros(mask_BR.shape, dtype=values_BR.dtype, device=mask_BR.device)
            return nothing_BR.masked_scatter(mask_BR, values_BR[is_drawn_BR])

        rewards_BR = None if self.conversations is None else compressed(self.conversations.turn_rewards_BR)
        return DrawnTokens(mask_BR, lengths_B, compressed(self.sampled_logprobs_BR), rewards_BR)

    @property
    def spans_B(self) -> torch.Tensor:
        """int64, how long each response is to its punishment: of parts beside each other the longest counts alone, and
        what an environment says not at all."""
        return self.drawn.lengths_B if self.formed is None else self.formed.positions_B

    @cached_property
    def _ids(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Prompts, their mask, responses and their lengths, copied to the CPU once: each row by itself would wait."""
        ids_BP, mask_BP, ids_BR = (
            part.cpu() for part in (self.prompt_ids_BP, self.prompt_mask_BP, self.response_ids_BR)
        )
        return ids_BP, mask_BP, ids_BR, self.response_lengths_B.tolist()

    def prompt_of(self, index: int) -> torch.Tensor:
        """int64 [prompt length], without padding, on the CPU."""
        ids_BP, mask_BP, _, _ = self._ids
        return ids_BP[index][mask_BP[index]]

    def response_of(self, index: int) -> torch.Tensor:
        """int64 [response length], without padding, on the CPU."""
        _, _, ids_BR, lengths = self._ids
        return ids_BR[index, : lengths[index]]

    def sequences(self) -> list[TokenSequence]:
        """Prompt and response of each row, without padding, on the CPU; the tokens that were drawn are the targets,
        each in one part."""
        found = [join(self.prompt_of(row), self.response_of(row)) for row in range(len(self.response_lengths_B))]
        if self.media is not None:
            found = [replace(sequence, media=own) for sequence, own in zip(found, self.media, strict=True)]
        if self.experts is not None:
            chosen = map(self.experts.of_sequence, range(len(found)), self._ids[1], self._ids[3])
            found = [replace(sequence, experts=own) for sequence, own in zip(found, chosen, strict=True)]
        if self.inserted_BR is not None:
            for sequence, response, inserted_R in zip(found, self._ids[3], self.inserted_BR.cpu(), strict=True):
                sequence.is_target[len(sequence) - response :] &= ~inserted_R[:response]
        forks = [
            tuple(len(sequence) - response + place for place in self._forks_of(row))
            for row, (sequence, response) in enumerate(zip(found, self._ids[3], strict=True))
        ]
        return [replace(sequence, forks=own) for sequence, own in zip(found, forks, strict=True)]

    def _forks_of(self, index: int) -> tuple[int, ...]:
        """The tokens of a response with which its forks begin."""
        return self._forks[index] if self._forks else ()

    @cached_property
    def _forks(self) -> list[tuple[int, ...]]:
        if self.conversations is None:
            return []
        return [tuple(begins_R.nonzero().flatten().tolist()) for begins_R in self.conversations.fork_begins_BR.cpu()]

    def turns_of(self, index: int) -> list[torch.Tensor]:
        """int64 each, what the model drew of a response, turn by turn, on the CPU: all of it, where no environment says
        anything in between."""
        if self.conversations is None:
            return [self.response_of(index)]
        return [ids_r for is_drawn, ids_r in self.parts_of(index) if is_drawn]

    def parts_of(self, index: int) -> list[tuple[bool, torch.Tensor]]:
        """Parts of a response in their order, drawn by the model (True) or inserted: int64 each, on the CPU."""
        ids_r = self.response_of(index)
        if self.inserted_BR is None:
            return [(True, ids_r)]
        drawn_r = ~self.inserted_BR[index, : len(ids_r)].cpu()
        borders = (drawn_r[1:] != drawn_r[:-1]).nonzero().flatten() + 1
        parts = ids_r.tensor_split(borders)
        return [(bool(drawn_r[begin]), part_r) for begin, part_r in zip([0, *borders.tolist()], parts, strict=True)]

    def texts(self, decode: Callable[[torch.Tensor], Any], end_token_ids: Collection[int]) -> list[str]:
        """The responses as text, without the tokens that ended them; of several turns the last."""
        last = (self.turns_of(index)[-1] for index in range(len(self.response_lengths_B)))
        return [str(decode(_without_end(ids_r, end_token_ids))) for ids_r in last]

    def whole_texts(self, decode: Callable[[torch.Tensor], Any], end_token_ids: Collection[int]) -> list[str]:
        """The whole responses as text, with what no model drew, without the tokens that ended them; each fork, which
        repeats the prompt and what came before, begins with a line that says so."""
        found = []
        for index in range(len(self.response_lengths_B)):
            ids_r = _without_end(self.response_of(index), end_token_ids)
            found.append(FORK_LINE.join(str(decode(part_r)) for part_r in ids_r.tensor_split(self._forks_of(index))))
        return found

    def turn_texts(self, decode: Callable[[torch.Tensor], Any], end_token_ids: Collection[int]) -> list[list[str]]:
        """Every turn of each response as text, without the tokens that ended them."""
        return [
            [str(decode(_without_end(ids_r, end_token_ids))) for ids_r in self.turns_of(index)]
            for index in range(len(self.response_lengths_B))
        ]

    def part_texts(
        self, decode: Callable[[torch.Tensor], Any], end_token_ids: Collection[int]
    ) -> list[list[tuple[str, str]]]:
        """Each response as (MODEL or ENVIRONMENT, its text), in turns; a fork, which repeats what came before, begins
        with FORK_LINE."""
        found = []
        for index in range(len(self.response_lengths_B)):
            parts, at = list[tuple[str, str]](), 0
            for drawn, ids_r in self.parts_of(index):
                line = FORK_LINE if at in self._forks_of(index) else ""
                text = str(decode(_without_end(ids_r, end_token_ids) if drawn else ids_r))
                parts.append((MODEL if drawn else ENVIRONMENT, line + text))
                at += len(ids_r)
            found.append(parts)
        return found


def right_padded(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of numbers as one tensor as wide as the longest, `fill` behind each."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def _without_end(ids_r: torch.Tensor, end_token_ids: Collection[int]) -> torch.Tensor:
    return ids_r[:-1] if int(ids_r[-1]) in end_token_ids else ids_r


def check_numbers(sampled_logprobs_BR: torch.Tensor, name: str) -> None:
    """ThreestepError if a log-probability of a rollout of the model `name` is NaN."""
    is_bad_BR = sampled_logprobs_BR.isnan()
    if not bool(is_bad_BR.any()):
        return
    row, token = is_bad_BR.nonzero()[0].tolist()
    raise ThreestepError(
        f"{name} computed NaN at token {token} of response {row} (both counted from 0) in a rollout of "
        f"{len(is_bad_BR)} responses, so nothing can be sampled: its weights have diverged, or overflow in --dtype; "
        "lower the learning rate, or try --dtype fp32 or another --rollout_engine"
    )
