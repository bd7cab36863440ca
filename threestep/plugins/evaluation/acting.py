"""A chat in which a plugin's partners answer the model: conversations of step 3, opened by a person's questions, and
shown as they grow.

Each question opens a conversation with the chat so far as the row's messages. Its turns are then drawn with the limits
and seeds of step 3, in a separate thread: whoever reads the answer may stop at any time, even if a tool hangs. Serves
threestep.plugins.evaluation.chat.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.evaluation.model import Answer, ChatModel, Trajectory, prompt_of
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rollout import Response, Rollout
from training.utils.contracts.rollout_engine import Ends, RolloutEngine, RolloutRequest, rolled_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.data.formats.messages import Message
    from training.utils.generation.arguments import SamplingArguments
    from training.utils.generation.partners import Partner, Partners

_NO_BOUND_TOKENS = 2**30


def check_acting(partners: Partners, models: Sequence[ChatModel]) -> None:
    """ThreestepError if a model's chat template, or its form of calls, does not fit."""
    for chat_model in models:
        _acting_engine(partners, chat_model, chat_model.engine, lambda row, seed: None)


def _acting_engine(
    partners: Partners, chat_model: ChatModel, engine: RolloutEngine, partner_of: Callable[[Any, int], Partner | None]
) -> RolloutEngine:
    """Return what draws a model's conversations by `engine`; ThreestepError as of `check_acting`."""
    return partners.acting(
        engine,
        chat_model.data.chat,
        chat_model.tokenizer,
        end_token_ids=chat_model.chat_ends,
        prompt_tokens=_NO_BOUND_TOKENS,
        partner_of=partner_of,
    )


def load_partners(partners: Partners) -> Partners | None:
    """Load who answers; None where nobody does. ThreestepError for a mistake in what is loaded."""
    if not partners.is_there:
        return None
    mistakes = Mistakes()
    partners.load(mistakes)
    mistakes.raise_if_any()
    return partners


def stream_trajectory(
    chat_model: ChatModel, partners: Partners, row: Mapping[str, Any], flags: SamplingArguments, *, seed: int
) -> Iterator[Answer]:
    """Yield the model's turns and what answers them, as one answer that grows; the last one is complete. Equal seeds
    give equal turns.

    row: opens the conversation; its `messages` are the chat. ThreestepError where that fails, or a turn has no room.
    """
    events: queue.SimpleQueue[Answer | BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()
    shown = _Shown(chat_model, partners, events.put, stopped)

    def work() -> None:
        try:
            events.put(_drawn(chat_model, row, flags, seed=seed, shown=shown))
            events.put(None)
        except BaseException as problem:  # noqa: BLE001 - whatever it is, it is the reader's
            events.put(problem)

    threading.Thread(target=work, name="a conversation of a chat", daemon=True).start()
    try:
        while (event := events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        stopped.set()


@dataclass(eq=False)
class _Shown:
    """One answer so far. tell: is called with it after each token. stopped: nobody reads it any more."""

    chat_model: ChatModel
    partners: Partners
    tell: Callable[[Answer], None]
    stopped: threading.Event
    messages: list[Message] = field(default_factory=list)
    before: str = ""
    answered: int = 0

    @property
    def ends(self) -> tuple[int, ...]:
        return self.chat_model.chat_ends

    def check(self) -> None:
        if self.stopped.is_set():
            raise ThreestepError("the reader of this answer has disconnected")

    def turn(self, ids: Sequence[int]) -> None:
        """A turn that is being drawn."""
        self.check()
        ended = ids[-1] in self.ends
        text = str(self.chat_model.tokenizer.decode(list(ids[:-1] if ended else ids)))
        text = text if ended else text.rstrip("\ufffd")
        self.tell(
            Answer(
                self._with(text), tuple(ids), ended, trajectory=Trajectory((*self.messages, _assistant_message(text)))
            )
        )

    def reply(self, turn: str, messages: Sequence[Message]) -> None:
        """A turn is over and answered."""
        self.before = self._with(turn) + "".join(f"\n  {_speaker(own)}> {_indented(own)}" for own in messages)
        self.messages += [_assistant_message(turn), *map(self.partners.remembered, messages)]
        self.answered += 1

    def whole(self, rollout: Rollout, with_reward: bool) -> Answer:
        """The complete answer."""
        assert rollout.conversations is not None
        (record,), (last,) = rollout.conversations.records, rollout.texts(self.chat_model.tokenizer.decode, self.ends)
        text, messages = self.before, list(self.messages)
        if record.turns > self.answered:
            text, messages = self._with(last), [*messages, _assistant_message(last)]
        reward = float(rollout.conversations.turn_rewards_BR.sum()) if with_reward else None
        acted = Trajectory(tuple(messages), record.turns, reward, record.cut, record.figures)
        return Answer(text, tuple(rollout.response_of(0).tolist()), bool(rollout.ended_B[0]), trajectory=acted)

    def _with(self, turn: str) -> str:
        return f"{self.before}\nmodel> {turn}" if self.answered else turn


def _assistant_message(turn: str) -> Message:
    return {"role": "assistant", "content": turn.strip()}


def _speaker(message: Message) -> str:
    return " ".join(str(message[key]) for key in ("role", "name") if key in message)


def _indented(message: Message) -> str:
    return str(message["content"]).replace("\n", "\n    ")


class _Streamed(RolloutEngine):
    """Draws one turn by the model's engine, token by token."""

    def __init__(self, chat_model: ChatModel, shown: _Shown) -> None:
        super().__init__()
        self._chat_model, self._shown = chat_model, shown

    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        self._shown.check()
        sampling = request.sampling
        room = self._chat_model.room_behind(request.prompt_ids_BP.shape[1], sampling.max_new_tokens)
        request = replace(request, sampling=replace(sampling, max_new_tokens=room))
        ids: list[int] = []
        for token in self._chat_model.engine.stream(model, request, ()):
            ids.append(token)
            self._shown.turn(ids)
        logprobs = [0.0] * len(ids)  # nothing learns from a chat
        drawn = Response(ids, logprobs, ids[-1] in sampling.end_token_ids)
        return Rollout.of_responses(request.repeated(), [drawn], sampling.pad_token_id)


class _ShownPartner:
    """A partner whose replies are shown before the model continues."""

    def __init__(self, partner: Partner, shown: _Shown) -> None:
        self._partner, self._shown = partner, shown

    @property
    def figures(self) -> Mapping[str, float]:
        return self._partner.figures

    def reset(self) -> Future[Any]:
        return self._partner.reset()

    def step(self, message: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def done(step: Future[Any]) -> None:
            self._shown.reply(message.text, step.result().messages)
            answer.set_result(step.result())

        self._partner.step(message).add_done_callback(done)
        return answer

    def close(self) -> None:
        self._partner.close()


def _drawn(
    chat_model: ChatModel, row: Mapping[str, Any], flags: SamplingArguments, *, seed: int, shown: _Shown
) -> Answer:
    """The complete answer; `shown` is told on the way."""
    partners = shown.partners

    def partner_of(row: Mapping[str, Any], seed: int) -> Partner | None:
        partner = partners.partner(row, seed)
        return None if partner is None else _ShownPartner(partner, shown)

    engine = _acting_engine(partners, chat_model, _Streamed(chat_model, shown), partner_of)
    sampling = replace(chat_model.sampling(flags), end_token_id=shown.ends[0], ends=Ends(token_ids=shown.ends[1:]))
    ids_P = torch.tensor(prompt_of(chat_model, row["messages"]).flipped_prompt_ids[::-1].copy(), dtype=torch.int64)
    request = RolloutRequest.of_prompt(ids_P.to(chat_model.model.device), sampling, seed)
    rollout = rolled_out(engine, chat_model.model, replace(request, rows=[row]))
    return shown.whole(rollout, partners.gives_rewards)
