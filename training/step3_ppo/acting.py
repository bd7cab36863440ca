"""Conversations of step 3: between its rows, the environments of its flags, and the tokens of its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedTokenizerBase

from training.step3_ppo.flags import PpoFlags
from training.utils.data.chat.chat import ChatTokenizer, text_maker
from training.utils.data.chat.turns import TurnTokens
from training.utils.data.rows.phases import PromptRow
from training.utils.environments.interface import AssistantMessage, Message
from training.utils.environments.loading import Environments
from training.utils.environments.parsers import Parsed, Parser, parser_of, read_message
from training.utils.generation.base import RolloutEngine
from training.utils.generation.conversations import ActingRollout, ConversationLimits, Partner, Speech
from training.utils.run.errors import ThreestepError

# In place of the tools, which each environment names only when it opens.
_ANY_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


def acting_engine(
    engine: RolloutEngine,
    environments: Environments,
    flags: PpoFlags,
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: Sequence[int],
) -> ActingRollout:
    """Return what draws conversations by `engine`. ThreestepError without a chat template, or with one that takes
    neither a tool's answer nor, from an environment, a user's message."""
    chat = text_maker(flags.data.chat, tokenizer)
    if not isinstance(chat, ChatTokenizer):
        raise ThreestepError(
            "--environment, --tools expect a chat template, which writes the messages of a conversation, got "
            "--prompt_style human_assistant; give one with --chat_template FILE"
        )
    limits = flags.conversation
    turns = TurnTokens(chat, limits.max_observation_tokens)
    parser, unknown = _parser(flags, chat)

    def opening(messages: Sequence[Message], tools: Any) -> list[int]:
        if tools and unknown is not None:
            raise unknown
        return turns.opening(messages, tools)

    def message(ids: Sequence[int]) -> AssistantMessage:
        said = ids[:-1] if ids[-1] in end_token_ids else ids
        return read_message(str(tokenizer.decode(list(said))), parser)

    def partner_of(row: PromptRow, seed: int) -> Partner | None:
        return environments.episode(_as_row(row), seed)

    return ActingRollout(
        engine,
        partner_of,
        Speech(opening, message, turns.reply, turns.history),
        ConversationLimits(
            limits.max_turns,
            limits.max_tool_calls,
            limits.max_conversation_seconds,
            flags.data.rows.max_prompt_seq_len,
        ),
        [_habit(turns, acts=flags.environment.environment is not None)],
    )


def _habit(turns: TurnTokens, acts: bool) -> str:
    """Return a sentence on what the chat template makes of a history once somebody answers: `acts`: an environment,
    not tools alone. ThreestepError if it takes no answer."""
    asked: dict[str, Any] = {"tool": [_ANY_TOOL], **({"user": None} if acts else {})}
    kept, forks, refused = [], [], []
    for role, tools in asked.items():
        try:
            what = turns.rewritten_before(role, tools)
        except ThreestepError as problem:
            refused.append((role, problem))
            continue
        kept += [role] if what is None else []
        forks += [] if what is None else [f"{what} of earlier turns otherwise once a message of role '{role}' follows"]
    if len(refused) == len(asked):
        raise refused[0][1]
    parts = [f"writes {each}, so that a conversation forks there: it goes on in another sequence" for each in forks]
    parts += [f"keeps earlier turns as they were drawn before messages of role {_named(kept)}"] if kept else []
    parts += [f"takes none of role '{role}'" for role, _ in refused]
    return f"conversations: the chat template {'; it '.join(parts)}"


def _named(roles: Sequence[str]) -> str:
    return " and ".join(f"'{role}'" for role in roles)


def _parser(flags: PpoFlags, chat: ChatTokenizer) -> tuple[Parser, ThreestepError | None]:
    """Return what reads calls; and what is wrong with --tool_parser, where that matters only if an environment opens
    with tools."""
    try:
        return parser_of(flags.environment.tool_parser, chat.finder([_ANY_TOOL], {}).template_text), None
    except ThreestepError as problem:
        if flags.environment.tools is not None:
            raise
        return Parsed, problem


def deciding_flags(flags: PpoFlags) -> dict[str, Any]:
    """By name, the flags that decide what conversations become; nothing without environments."""
    return {**asdict(flags.environment), **asdict(flags.conversation)} if flags.environment.is_on else {}


def _as_row(row: PromptRow) -> dict[str, Any]:
    """What an environment's `reset` gets."""
    own = {"messages": row.columns["raw_prompt"], "prompt": row.prompt_text, "ground_truth": row.reference}
    return {**row.columns, **own}
