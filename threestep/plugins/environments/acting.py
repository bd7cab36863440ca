"""Conversations of a model with its environments: between messages, the tokens of a chat template, and turns.

Serves step 3, whose rows open the environments, and threestep.plugins.evaluation.chat, in which a person does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threestep.plugins.environments.calling.parsers import Parsed, Parser, parser_of, read_message
from threestep.plugins.environments.turns.conversations import ActingRollout, ConversationLimits, Speech
from threestep.plugins.environments.turns.turn_tokens import TurnTokens
from training.utils.base.errors import ThreestepError
from training.utils.data.chat.chat import ChatTokenizer
from training.utils.data.chat.style import text_maker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from threestep.plugins.environments.arguments import EnvironmentArguments
    from threestep.plugins.environments.conversation_arguments import ConversationArguments
    from threestep.plugins.environments.interface import AssistantMessage, Message
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.data.rows.arguments import ChatArguments
    from training.utils.generation.partners import Partner

# In place of the tools, which each environment names only when it opens.
_ANY_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class ActingSettings:
    """The flags of a conversation. prompt_tokens: with which one may begin."""

    chat: ChatArguments
    environment: EnvironmentArguments
    conversation: ConversationArguments
    prompt_tokens: int


def acting_engine(
    engine: RolloutEngine,
    partner_of: Callable[[Any, int], Partner | None],
    settings: ActingSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_token_ids: Sequence[int],
) -> ActingRollout:
    """Return a sampler of conversations on `engine`. ThreestepError without a chat template, or with one that takes
    neither a tool's answer nor, from an environment, a user's message.

    partner_of: see ActingRollout. end_token_ids: each ends a turn.
    """
    chat, limits = text_maker(settings.chat, tokenizer), settings.conversation
    if not isinstance(chat, ChatTokenizer):
        raise ThreestepError(
            "--environment and --tools need a chat template to write a conversation's messages, but --prompt_style is "
            "human_assistant; pass one with --chat_template FILE"
        )
    turns = TurnTokens(chat, limits.max_observation_tokens)
    parser, unknown = _parser(settings.environment, chat)

    def opening(messages: Sequence[Message], tools: Any) -> list[int]:
        if tools and unknown is not None:
            raise unknown
        return turns.opening(messages, tools)

    def message(ids: Sequence[int]) -> AssistantMessage:
        turn = ids[:-1] if ids[-1] in end_token_ids else ids
        return read_message(str(tokenizer.decode(list(turn))), parser)

    return ActingRollout(
        engine,
        partner_of,
        Speech(opening, message, turns.reply, turns.history),
        ConversationLimits(
            limits.max_turns,
            limits.max_tool_calls,
            limits.max_conversation_seconds,
            settings.prompt_tokens,
            limits.answer_interval,
        ),
        habits=[history_habit(turns, acts=settings.environment.environment is not None)],
    )


def history_habit(turns: TurnTokens, acts: bool) -> str:
    """Return a sentence on how the chat template treats a history once somebody answers. acts: an environment, not
    tools alone. ThreestepError if it takes no answer."""
    roles: dict[str, Any] = {"tool": [_ANY_TOOL], **({"user": None} if acts else {})}
    kept, forks, refused = [], [], []
    for role, tools in roles.items():
        try:
            what = turns.rewritten_before(role, tools)
        except ThreestepError as problem:
            refused.append((role, problem))
            continue
        kept += [role] if what is None else []
        forks += [] if what is None else [f"changes {what} of earlier turns when a message of role '{role}' follows"]
    if len(refused) == len(roles):
        raise refused[0][1]
    parts = [f"{each}, so a conversation forks there and continues in a new sequence" for each in forks]
    parts += [f"keeps earlier turns as they were drawn when messages of role {_named(kept)} follow"] if kept else []
    parts += [f"accepts no message of role '{role}'" for role, _ in refused]
    return f"conversations: the chat template {'; it '.join(parts)}"


def _named(roles: Sequence[str]) -> str:
    return " and ".join(f"'{role}'" for role in roles)


def _parser(flags: EnvironmentArguments, chat: ChatTokenizer) -> tuple[Parser, ThreestepError | None]:
    """Return the parser of calls; and the mistake in --tool_parser, if it matters only once an environment opens with
    tools."""
    try:
        return parser_of(flags.tool_parser, chat.finder([_ANY_TOOL], {}).template.text), None
    except ThreestepError as problem:
        if flags.tools is not None:
            raise
        return Parsed, problem
