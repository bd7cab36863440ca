"""Rollouts of several turns: a model draws, an environment answers, and the model goes on behind the answer.

A conversation whose turn is drawn leaves the batch, and comes back when its environment has answered; the others go on
meanwhile. Engines that cannot do that draw in rounds (`turns.Turns`). A response is the tokens from the first drawn one
to the last: what an environment says in between is marked as inserted, and never comes last. Where a chat template
rewrites the history once an environment has spoken, the conversation forks: its next turn is drawn behind the history
as it is now written, all of it inserted too, and what was drawn before stays where it was drawn. A row without an
environment has one turn, the same as without this file.

The first turn is drawn from the response's own seed, a later one from a seed derived from it and the turn's number: no
token depends on the rest of the batch. How a log-probability is rounded does: so the drawn tokens alone decide when an
answer joins the batch, which waits for one that is late (`_Awaited`), and a rollout repeats to the bit, however long
answers take. Ranks go their own ways: the engines that draw turns call no other rank while the model is lent to them.

B sequences, P prompt tokens, R response tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.environments.turns.kept_turns import TurnsKept
from threestep.plugins.environments.turns.rounds import Rounds
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import derived_seed
from training.utils.contracts.drawing import DrawnTurn, NextTurn, Turns
from training.utils.contracts.rollout import ConversationRecord, Conversations, Response, Rollout, right_padded
from training.utils.contracts.rollout_engine import IN_ONE_PIECE, Drawing, EngineWrapper, RolloutEngine, RolloutRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.generation.partners import Partner
    from training.utils.models.own_forward import OwnForward


@dataclass(frozen=True)
class Speech:
    """Between the messages of environments and tokens.

    prompt: messages and tools -> ids up to the first turn.
    message: ids of a turn -> what a partner's `step` takes; its `calls` are counted.
    reply: messages, tools and the last token of the turn before them -> ids up to the next turn, with `cut_messages`.
    history: all that was said (messages of the opening, then a turn's and those of its reply in turns), how many
        messages the opening has, tools, and the ids of it all as they would be appended -> the `ids` of a fork, None
        where the template writes the same, and `is_refused` where it writes none.
    """

    prompt: Callable[[Any, Any], list[int]]
    message: Callable[[Sequence[int]], Any]
    reply: Callable[[Any, Any, int], Any]
    history: Callable[[Sequence[Any], int, Any, list[int]], Any]


@dataclass(frozen=True)
class ConversationLimits:
    """turns, calls: of a conversation. seconds: after which none begins another turn. prompt_tokens: of the messages
    with which one begins. None: no limit. answer_interval: tokens, see `_Awaited`."""

    turns: int
    calls: int | None
    seconds: float | None
    prompt_tokens: int
    answer_interval: int


@dataclass(eq=False)
class _Conversation:
    """prompt: ids. messages: messages, of which `opened` were there before the first turn. Of the response so far: ids,
    logprobs, inserted and rewards, by token, and where forks begin. begin: of its last turn. spent: tokens that were
    drawn or said by the environment, without what forks repeat."""

    seed: int
    partner: Partner | None
    prompt: list[int] = field(default_factory=list)
    tools: Any = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    inserted: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    opened: int = 0
    spent: int = 0
    turns: int = 0
    calls: int = 0
    cut_messages: int = 0
    refused_histories: int = 0
    begin: int = 0
    ended: bool = False
    cut: str | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def context(self) -> list[int]:
        """The ids behind which the next turn is drawn: those of the last fork, where there is one."""
        return self.ids[self.forks[-1] :] if self.forks else self.prompt + self.ids

    def next_turn(self, limits: ConversationLimits, most: int) -> NextTurn:
        """most: tokens of a response."""
        seed, ids = derived_seed(self.seed, "turn", self.turns) if self.turns else self.seed, self.context
        return NextTurn(self, ids, seed, min(most - self.spent, limits.prompt_tokens + most - len(ids)))

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """logprobs: None where no model drew the tokens."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.inserted += [logprobs is None] * len(ids)
        self.rewards += [0.0] * len(ids)
        self.spent += len(ids)

    def hear(self, ids: Sequence[int], fork: Sequence[int] | None) -> None:
        """Take what an environment said: ids that go on from the turn before, or in their place all of a fork's."""
        if fork is not None:
            self.forks.append(len(self.ids))
            self.spent += len(ids) - len(fork)
        self.append(ids if fork is None else fork, None)
        self.begin = len(self.ids)

    @property
    def record(self) -> ConversationRecord:
        figures = {} if self.partner is None else {name: float(own) for name, own in self.partner.figures.items()}
        for name in ("cut_messages", "refused_histories"):
            if own := getattr(self, name):
                figures[name] = figures.get(name, 0.0) + own
        return ConversationRecord(self.turns, self.cut, figures, len(self.forks))


class ActingRollout(EngineWrapper):
    """Draws conversations, turn by turn, by another engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        partner_of: Callable[[Any, int], Partner | None],
        speech: Speech,
        limits: ConversationLimits,
        *,
        habits: Sequence[str] = (),
    ) -> None:
        """partner_of: the environment for a row of the request and a seed, None for one turn without one. habits:
        sentences on how conversations go on, told where the run starts."""
        super().__init__(engine)
        self._partner_of, self._speech, self._limits = partner_of, speech, limits
        self._habits = list(habits)

    def check(
        self, lent: AbstractContextManager[PreTrainedModel], own: OwnForward, drawing: Drawing = IN_ONE_PIECE
    ) -> list[str]:
        return self._habits + super().check(lent, own, replace(drawing, turns=TurnsKept()))

    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        """ThreestepError for environments that begin otherwise for two samples of a prompt, or with too many tokens."""
        started = time.perf_counter()
        every = self._begun(request)
        try:
            self._open(every, request)
            with contextlib.closing(self._turns(model, request, every)) as turns:
                self._converse(every, turns, request.sampling.max_new_tokens)
            records = tuple(each.record for each in every)
        finally:
            for each in every:
                if each.partner is not None:
                    each.partner.close()
        rollout = _as_rollout(every, records, request)
        return replace(rollout, seconds=time.perf_counter() - started)

    def _begun(self, request: RolloutRequest) -> list[_Conversation]:
        assert request.rows is not None, "conversations are opened for rows"
        rows = [row for row in request.rows for _ in range(request.samples_per_prompt)]
        return [_Conversation(seed, self._partner_of(row, seed)) for row, seed in zip(rows, request.seeds, strict=True)]

    def _open(self, every: Sequence[_Conversation], request: RolloutRequest) -> None:
        """Begin all conversations: environments open side by side."""
        openings = [None if each.partner is None else each.partner.reset() for each in every]
        ids_BP, mask_BP = request.prompt_ids_BP.cpu(), request.prompt_mask_BP.cpu()
        samples = request.samples_per_prompt
        for place, (each, opening) in enumerate(zip(every, openings, strict=True)):
            prompt = place // samples
            if opening is None:
                each.prompt = ids_BP[prompt][mask_BP[prompt]].tolist()
            else:
                messages, each.tools = opening.result()
                each.prompt = self._speech.prompt(messages, each.tools)
                each.messages, each.opened = list(messages), len(messages)
            self._check_opening(each, every[prompt * samples])

    def _check_opening(self, each: _Conversation, first: _Conversation) -> None:
        """first: of the same prompt."""
        most = self._limits.prompt_tokens
        if len(each.prompt) > most:
            raise ThreestepError(
                f"--environment, --tools: a conversation begins with {len(each.prompt)} tokens, including its tools, "
                f"but --max_prompt_seq_len is {most}; raise it, or shorten the environment's opening"
            )
        if each.prompt != first.prompt:
            raise ThreestepError(
                "--environment needs a reset that returns the same messages for all samples of a prompt, because they "
                "are compared with each other, but two samples got different ones; let the row determine these "
                "messages, and the seed what follows"
            )

    def _turns(self, model: PreTrainedModel, request: RolloutRequest, every: Sequence[_Conversation]) -> Turns:
        """Turns as the engine keeps them, or in rounds. If nobody answers, one round is enough, and fastest."""
        is_answered = any(each.partner is not None for each in every)
        kept = self._engine.turns_of(model, request.sampling) if is_answered else None
        device = request.prompt_ids_BP.device
        return kept or Rounds(self._engine, model, request.sampling, request.samples_per_prompt, device=device)

    def _converse(self, every: Sequence[_Conversation], turns: Turns, most: int) -> None:
        """Draw all conversations to their ends. most: tokens of a response."""
        for each in every:
            turns.add(each.next_turn(self._limits, most))
        awaited = _Awaited(turns, self._limits.answer_interval)
        while turns.is_drawing or awaited.count:
            for drawn in turns.advance() if turns.is_drawing else ():
                step = self._take_turn(drawn)
                if step is None:
                    turns.drop(drawn.key)
                else:
                    awaited.add(step, drawn.key)
            for each, reply in awaited.answered():
                if self._take_reply(each, reply, most):
                    turns.add(each.next_turn(self._limits, most))
                else:
                    turns.drop(each)

    def _take_turn(self, drawn: DrawnTurn) -> Future[Any] | None:
        """Take a turn; return the running step of the conversation's environment, None where the conversation is
        over."""
        each = drawn.key
        each.append(drawn.ids, drawn.logprobs)
        each.turns += 1
        each.ended = drawn.ended
        if not each.ended:  # in the middle of a turn: a cut call is no call
            each.cut = "tokens"
            return None
        if each.partner is None:
            return None
        message = self._speech.message(each.ids[each.begin :])
        each.messages.append(message)
        each.calls += len(message.calls)
        if self._limits.calls is not None and each.calls > self._limits.calls:
            each.ended, each.cut = False, "calls"
            return None
        return each.partner.step(message)

    def _take_reply(self, each: _Conversation, reply: Any, most: int) -> bool:
        """Take an environment's reply; whether another turn follows."""
        each.rewards[-1] = float(reply.reward)
        if reply.done:
            return False
        each.ended = False
        limits = self._limits
        if each.turns == limits.turns:
            each.cut = "turns"
        elif limits.seconds is not None and time.monotonic() - each.started >= limits.seconds:
            each.cut = "seconds"
        else:
            heard = self._speech.reply(reply.messages, each.tools, each.ids[-1])
            each.messages += reply.messages
            each.cut_messages += heard.cut_messages
            appended = each.context + list(heard.ids)
            history = self._speech.history(each.messages, each.opened, each.tools, appended)
            each.refused_histories += history.is_refused
            longest = limits.prompt_tokens + most  # of what the model reads with a token behind it
            if each.spent + len(heard.ids) < most and len(history.ids or appended) < longest:
                each.hear(heard.ids, history.ids)
                return True
            each.cut = "tokens"  # no room for a token behind them: they are left out
        return False


class _Awaited:
    """The steps of environments that run, in the order in which their turns were over, and when their conversations go
    on: every `interval` drawn tokens those that have run for half as many, and all where nothing else is drawn. What is
    late is waited for, so that delays decide nothing. An interval of 0 takes each answer as soon as it is there."""

    def __init__(self, turns: Turns, interval: int) -> None:
        self._turns, self._interval, self._next = turns, interval, interval
        self._running = dict[Future[Any], tuple[_Conversation, int]]()

    @property
    def count(self) -> int:
        return len(self._running)

    def add(self, step: Future[Any], each: _Conversation) -> None:
        self._running[step] = each, self._turns.steps

    def answered(self) -> list[tuple[_Conversation, Any]]:
        """Return the conversations that go on now, with their answers."""
        due = self._due()
        wait(due)
        return [(self._running.pop(step)[0], step.result()) for step in due]

    def _due(self) -> list[Future[Any]]:
        running, now = self._running, self._turns.steps
        if not self._turns.is_drawing and running:
            if self._interval or self._turns.in_rounds:
                return [*running]
            wait(running, return_when=FIRST_COMPLETED)
        if not self._interval:
            return [step for step in running if step.done()]
        if now < self._next:
            return []
        self._next = (now // self._interval + 1) * self._interval
        return [step for step, (_, since) in running.items() if now - since >= self._interval // 2]


def _as_rollout(
    every: Sequence[_Conversation], records: tuple[ConversationRecord, ...], request: RolloutRequest
) -> Rollout:
    pad, device = request.sampling.pad_token_id, request.prompt_ids_BP.device
    backwards = [each.prompt[::-1] for each in every]  # of which what is padded on the right is left-padded
    prompt_ids_BP = right_padded(backwards, pad, torch.int64).flip(1)
    prompt_mask_BP = right_padded([[True] * len(ids) for ids in backwards], False, torch.bool).flip(1)
    rollout = Rollout.of_responses(
        (prompt_ids_BP.to(device), prompt_mask_BP.to(device)),
        [Response(each.ids, each.logprobs, each.ended) for each in every],
        pad,
    )
    begins_BR = torch.zeros(rollout.response_ids_BR.shape, dtype=torch.bool)
    for row, each in enumerate(every):
        begins_BR[row, each.forks] = True
    inserted_BR = right_padded([each.inserted for each in every], False, torch.bool)
    rewards_BR = right_padded([each.rewards for each in every], 0, torch.float32)
    columns_BR = (part_BR.to(device) for part_BR in (inserted_BR, begins_BR, rewards_BR))
    return replace(rollout, inserted=Conversations(records, *columns_BR))
