"""A finished model that is asked: how a conversation becomes its prompt, and what it answers, word by word.

Prompts are rendered by the data room, as step 3 renders those that are made while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from training.asking.arguments import SamplingArguments
from training.asking.engines import Drawing, by_transformers, positions_of
from training.step3_ppo.rollout.base import Sampling
from training.utils.data.arguments import DataArguments
from training.utils.data.chat import conversation_end, use_chat_template
from training.utils.data.message_forms import Message
from training.utils.data.phases import PromptRow
from training.utils.data.prompt_maker import PromptMaker
from training.utils.data.tokenize import end_of_conversation_id
from training.utils.models.loading import load_causal_lm, load_config, load_tokenizer
from training.utils.models.settings import ModelSettings
from training.utils.run.errors import ThreestepError

_NO_BOUND_TOKENS = 2**30


@dataclass(frozen=True)
class Answer:
    """token_ids: with the token that ended it, where `ended`; without, max_new_tokens cut it. text: without that
    token. While an answer is being written, what there is of it so far."""

    text: str
    token_ids: tuple[int, ...]
    ended: bool


@dataclass(frozen=True)
class AskedModel:
    """data: with the prompt style that this model is asked in. end_token_id: of a response, as step 3 has it.
    more_end_tokens: the model's own, at which an answer stops too. drawing: what draws its answers."""

    name: str
    model: PreTrainedModel
    drawing: Drawing
    tokenizer: Any
    data: DataArguments
    end_token_id: int
    more_end_tokens: frozenset[int]

    @property
    def positions(self) -> int | None:
        """The longest prompt with its answer; None: no bound."""
        bounds = [bound for bound in (positions_of(self.model), self.drawing.longest_tokens) if bound is not None]
        return min(bounds, default=None)

    def sampling(self, flags: SamplingArguments) -> Sampling:
        return Sampling(
            max_new_tokens=flags.max_new_tokens,
            temperature=flags.temperature,
            top_k=flags.top_k,
            top_p=flags.top_p,
            min_p=flags.min_p,
            end_token_id=self.end_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )


def load_asked_model(
    name_or_path: str,
    dtype: str | None,
    data: DataArguments,
    device: torch.device,
    drawing: Callable[[PreTrainedModel], Drawing] = by_transformers,
) -> AskedModel:
    """Load a causal language model and its tokenizer. ThreestepError where that cannot be asked in data's style."""
    tokenizer = use_chat_template(load_tokenizer(name_or_path, end_may_pad=True), data)
    end_id = end_of_conversation_id(tokenizer, conversation_end(data, tokenizer))
    model: Any = load_causal_lm(ModelSettings(name_or_path), dtype_of(name_or_path, dtype), len(tokenizer))
    model = model.to(device).eval().requires_grad_(False)
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = own if isinstance(own, list) else [own]
    more = frozenset(int(end) for end in [*ends, tokenizer.eos_token_id] if end is not None)
    return AskedModel(name_or_path, model, drawing(model), tokenizer, data, end_id, more)


def dtype_of(name_or_path: str, asked: str | None) -> torch.dtype:
    """The torch dtype of `--dtype`, or where None the one that the weights were saved in (float32 where unknown)."""
    if asked is not None:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[asked]
    saved = getattr(load_config(name_or_path), "dtype", None)
    return saved if isinstance(saved, torch.dtype) else torch.float32


def prompt_of(asked: AskedModel, messages: Sequence[Message]) -> PromptRow:
    """The prompt that asks for the next answer. ThreestepError where the messages make none."""
    data = replace(asked.data, max_prompt_seq_len=_NO_BOUND_TOKENS)
    row = PromptMaker(data, asked.tokenizer).make(list(messages), None, 0)
    if row is None:
        raise ThreestepError(f"the conversation makes no prompt for '{asked.name}': it is empty; say something")
    return row


def stream_answer(
    asked: AskedModel, messages: Sequence[Message], flags: SamplingArguments, seed: int
) -> Iterator[Answer]:
    """Yield the answer as it grows; the last one yielded is whole. Equal seeds give equal answers.

    The model's positions bound it too. Raises ThreestepError where the prompt leaves no room for an answer.
    """
    prompt_ids = prompt_of(asked, messages).flipped_prompt_ids[::-1].copy()
    if asked.positions is not None:
        room = asked.positions - len(prompt_ids)
        if room < 1:
            raise ThreestepError(
                f"the conversation has {len(prompt_ids)} tokens and '{asked.name}' has {asked.positions} positions, "
                "which leaves no room for an answer; /reset begins anew"
            )
        flags = replace(flags, max_new_tokens=min(flags.max_new_tokens, room))
    ends = {asked.end_token_id, *asked.more_end_tokens}
    ids: list[int] = []
    prompt_ids_P = torch.tensor(prompt_ids, dtype=torch.int64, device=asked.model.device)
    for token in asked.drawing.stream(prompt_ids_P, asked.sampling(flags), seed, asked.more_end_tokens):
        ids.append(token)
        ended = token in ends
        text = asked.tokenizer.decode(ids[:-1] if ended else ids)
        last = ended or len(ids) == flags.max_new_tokens
        # A character of several tokens is shown when it is whole.
        yield Answer(text if last else text.rstrip("\ufffd"), tuple(ids), ended)


def check_room(asked: AskedModel, longest_tokens: int, flags: str) -> None:
    """ThreestepError where `longest_tokens`, what `flags` allow, is more than the model has positions for."""
    if asked.positions is not None and longest_tokens > asked.positions:
        raise ThreestepError(
            f"{flags} allow sequences of {longest_tokens} tokens and '{asked.name}' has {asked.positions} positions; "
            "lower them"
        )
