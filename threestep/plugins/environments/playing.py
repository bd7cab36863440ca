"""One conversation with an environment in the terminal: a person types the model's turns, or a model draws them.

With a tokenizer the conversation is drawn as step 3 draws it, and its tokens are shown with their mask. A line of a
person is a turn; `\\n` in it is a line break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.environments.calling.parsers import PARSERS, Parsed, Parser, read_message
from training.utils.contracts.rollout import FORK_LINE, Response, Rollout
from training.utils.contracts.rollout_engine import Ends, RolloutEngine, RolloutRequest, Sampling, rolled_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.environments.episodes import Episode
    from threestep.plugins.environments.interface import EnvironmentReply, Message, Opening
    from threestep.plugins.environments.turns.conversations import ActingRollout
    from training.utils.generation.partners import Partner

Tell = Callable[[str], None]
Ask = Callable[[], str]  # EOFError where the person leaves
_SHOWN_IDS = 12


def play_by_hand(episode: Episode, parser: Parser, turns: int, ask: Ask, *, tell: Tell) -> None:
    """Play without tokens, up to `turns` turns."""
    shown = ShownPartner(episode, tell)
    try:
        shown.reset().result()
        for _ in range(turns):
            reply = shown.step(read_message(typed(ask()), parser)).result()
            if reply.done:
                break
        else:
            tell(f"(cut: {turns} turns)")
        tell(outcome(sum(episode.rewards), episode.figures))
    finally:
        shown.close()


def play(
    acting: Callable[[RolloutEngine, Callable[[Any, int], Partner]], ActingRollout],
    engine: RolloutEngine,
    request: RolloutRequest,
    episode: Episode,
    *,
    model: PreTrainedModel | Any,
    tell: Tell,
    says: str | None = None,
) -> Rollout:
    """Play the conversation of a request of one row, drawn by `engine`. acting: makes what draws conversations, of an
    engine and of the environment for a row and a seed. says: see ShownPartner."""
    rollout = rolled_out(acting(engine, lambda row, seed: ShownPartner(episode, tell, says)), model, request)
    assert rollout.conversations is not None
    (record,) = rollout.conversations.records
    if record.cut is not None:
        tell(f"(cut by the limit of {record.cut})")
    tell(outcome(float(rollout.conversations.turn_rewards_BR.sum()), record.figures))
    return rollout


def request_of(row: Mapping[str, Any], seed: int, sampling: Sampling, device: torch.device | str) -> RolloutRequest:
    """The request for a row's conversation, which its environment opens."""
    return replace(
        RolloutRequest.of_prompt(torch.zeros(1, dtype=torch.int64, device=device), sampling, seed), rows=[row]
    )


def hand_sampling(most_tokens: int, end_token_ids: Sequence[int], pad_token_id: int) -> Sampling:
    """Settings for turns that a person types."""
    first, *more = end_token_ids
    return Sampling(most_tokens, 1.0, 0, 1.0, first, pad_token_id, ends=Ends(token_ids=tuple(more)))


class HandEngine(RolloutEngine):
    """A person's turns as an engine: what is typed, encoded, and the token that ends a turn."""

    def __init__(self, encode: Callable[[str], list[int]], ask: Ask) -> None:
        super().__init__()
        self._encode, self._ask = encode, ask

    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        most = request.sampling.max_new_tokens
        ids = [*self._encode(typed(self._ask())), request.sampling.end_token_id]
        turn = Response(ids[:most], [0.0] * len(ids[:most]), len(ids) <= most)
        return Rollout.of_responses(request.repeated(), [turn], request.sampling.pad_token_id)


class ShownPartner:
    """An environment whose messages are shown. says: the speaker of the model's turns, which are then shown too."""

    def __init__(self, episode: Episode, tell: Tell, says: str | None = None) -> None:
        self._episode, self._tell, self._says = episode, tell, says

    @property
    def figures(self) -> Mapping[str, float]:
        return self._episode.figures

    def reset(self) -> Future[Opening]:
        begun = self._episode.reset()
        opening = begun.result()
        for message in opening.messages:
            self._tell(line_of(message))
        if opening.tools:
            self._tell(f"tools: {', '.join(map(signature_of, opening.tools))}")
        return begun

    def step(self, message: Any) -> Future[EnvironmentReply]:
        if self._says:
            self._tell(f"{self._says}> {message.text}")
        stepped = self._episode.step(message)
        for said in stepped.result().messages:
            self._tell(line_of(said))
        return stepped

    def close(self) -> None:
        self._episode.close()


def any_form(text: str) -> Parsed:
    """Read the calls of a text in the first form that finds some."""
    parsed = [parse(text) for parse in PARSERS.values()]
    return next((each for each in parsed if each.calls), next((each for each in parsed if each.problems), Parsed(text)))


def typed(line: str) -> str:
    """A person's line as a turn."""
    return line.replace("\\n", "\n")


def line_of(message: Message) -> str:
    """A message as a line: its speaker and its text."""
    speaker = " ".join(str(message[key]) for key in ("role", "name") if key in message)
    return f"{speaker}> {message.get('content') or ''}".replace("\n", "\n    ")


def signature_of(tool: Mapping[str, Any]) -> str:
    """A tool's name with the names of its arguments."""
    function = tool.get("function", tool)
    return f"{function.get('name')}({', '.join(function.get('parameters', {}).get('properties', {}))})"


def outcome(reward: float, figures: Mapping[str, float]) -> str:
    """The end of a conversation as a line."""
    shown = [f"{name} {value:.3g}" for name, value in figures.items() if value]
    return ", ".join([f"reward {reward:g}", *shown])


def token_lines(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the tokens of the one conversation of a rollout: a line for each run of them, with its mask (1: drawn, and
    trained), their number, ids and text."""
    assert rollout.conversations is not None
    prompt = rollout.prompt_ids_BP[0][rollout.prompt_mask_BP[0]].tolist()
    yield _token_line(0, prompt, decode)
    ids = rollout.response_of(0).tolist()
    inserted = rollout.conversations.inserted_BR[0].tolist()
    forks = rollout.conversations.fork_begins_BR[0].tolist()
    begin = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or inserted[place] != inserted[begin] or forks[place]:
            if forks[begin]:
                yield FORK_LINE.strip()
            yield _token_line(int(not inserted[begin]), ids[begin:place], decode)
            begin = place


def _token_line(mask: int, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    shown = " ".join(map(str, ids[:_SHOWN_IDS])) + (" ..." if len(ids) > _SHOWN_IDS else "")
    return f"mask {mask}  {len(ids):>5} tokens  [{shown}]  {decode(list(ids))!r}"
