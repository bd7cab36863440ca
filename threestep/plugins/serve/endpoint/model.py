"""The model that is served: its prompts as in training, its ends, its text, and what draws from it.

The one module of the endpoint that knows how finished models are loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.evaluation.model import (
    ChatModel,
    dtype_of,
    load_chat_model,
    open_chat_folder,
    prompt_of,
    start_alone,
)
from threestep.plugins.ragged.check import why_not_in_turns
from threestep.plugins.serve.endpoint.lines import AloneRows, Order, Rows, TogetherRows
from threestep.plugins.serving.refusals import RefusedRequest
from training.utils.base.console import note
from training.utils.contracts.rollout_engine import RolloutRequest
from training.utils.data.arguments import DataArguments
from training.utils.data.chat.chat import template_text
from training.utils.data.chat.style import saved_style
from training.utils.data.formats.messages import FRAME
from training.utils.data.rows.arguments import CHAT_TEMPLATE, HUMAN_ASSISTANT
from training.utils.data.rows.tokenize import TextTokenizer
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.loading.configurations import saved_stop_tokens
from training.utils.loading.weight_files import find_adapter
from training.utils.models.own_forward import own_forward_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.serve.endpoint.fields import CompletionRequest
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.data.formats.messages import Message
    from training.utils.data.rows.arguments import ChatArguments
    from training.utils.generation.arguments import SamplingArguments

LONGEST_TOKENS = 32768  # of a prompt with its answer, of models whose positions bound neither


@dataclass(frozen=True)
class ServedModel:
    """A loaded model. name: by which requests ask for it. make_rows: what draws. has_logprobs: of its tokens."""

    name: str
    chat_model: ChatModel
    make_rows: Callable[[], Rows]
    has_logprobs: bool
    _lock: Any

    @property
    def strips(self) -> bool:
        """Spaces around an answer belong to the prompt style."""
        return self.chat_model.data.chat.prompt_style != CHAT_TEMPLATE

    @property
    def ends(self) -> frozenset[int]:
        """Each ends an answer."""
        return frozenset(self.chat_model.chat_ends)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer's tokens."""
        return self.chat_model.tokenizer.decode(ids)

    def word(self, token: int) -> str:
        """The text of one token."""
        return self.chat_model.tokenizer.decode([token])

    def prompts(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        """The ids of a request's prompts, a chat's as in training. ThreestepError for those that cannot be made."""
        with self._lock:  # tokenizers are changed while they encode
            if request.messages is not None:
                return [self._chat_ids(request.messages)]
            return [self._text_ids(prompt) for prompt in request.prompts]

    def _chat_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(prompt_of(self.chat_model, messages).flipped_prompt_ids[::-1].tolist())

    def _text_ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        tokenizer = self.chat_model.tokenizer
        if isinstance(prompt, str):
            end = tokenizer.convert_ids_to_tokens(self.chat_model.end_token_id)
            [ids] = TextTokenizer(tokenizer, end).encode_prompts([prompt])
        else:
            ids = prompt
        strange = next((token for token in ids if not 0 <= token < len(tokenizer)), None)
        if strange is not None:
            raise RefusedRequest(
                f"'prompt' must contain ids from 0 to {len(tokenizer) - 1}, got {strange}", param="prompt"
            )
        if not ids:
            raise RefusedRequest("'prompt' must not be empty, because the model has no start token",
                                 param="prompt")  # fmt: skip
        return tuple(ids)

    def orders(
        self,
        request: CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        flags: SamplingArguments,
        seeds: Sequence[int],
    ) -> list[Order]:
        """The answers to draw, those to one prompt adjacent. flags: for what the request leaves open. seeds: of each.
        RefusedRequest for answers longer than the model's positions, and log-probabilities that there are not."""
        if request.alternatives is not None and not self.has_logprobs:
            raise RefusedRequest("'logprobs' is not supported for this model family; leave it out", param="logprobs")
        flags = replace(flags, **request.sampling)
        found = list[Order]()
        for ids in prompts:
            most = self._room_behind(len(ids), request.most_tokens, flags.max_new_tokens)
            sampling = self.chat_model.sampling(replace(flags, max_new_tokens=most))
            found += [Order(ids, sampling, self.ends, 0, request.alternatives)] * request.samples
        return [replace(order, seed=seed) for order, seed in zip(found, seeds, strict=True)]

    def _room_behind(self, prompt_tokens: int, most: int | None, default: int) -> int:
        room = (self.chat_model.positions or LONGEST_TOKENS) - prompt_tokens
        if room < 1 or (most is not None and most > room):
            raise RefusedRequest(
                f"the prompt has {prompt_tokens} tokens and the model {room + prompt_tokens} positions, which "
                f"leaves room for {max(room, 0)} response tokens, not {default if most is None else most}; shorten "
                "the prompt, or lower max_tokens",
                param="messages" if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        return min(default, room) if most is None else most


def load_served(path: str, name: str, flags: SamplingArguments, chat: ChatArguments) -> ServedModel:
    """Load a finished model as `threestep chat` does. Prints to standard error its prompt style, and where its answers
    are not drawn in one batch, why."""
    rank = start_alone()
    data = DataArguments(chat=chat)
    chat_model = load_chat_model(path, flags.dtype, data, rank.device, start_engine=_started, with_media=False)
    own = own_forward_of(chat_model.model)
    assert own is not None, "a loaded model has been checked"
    reason = why_not_in_turns(chat_model.model, own, False)
    if reason is not None:
        note(f"{path}: responses are generated one at a time instead of in a batch, and without logprobs: {reason}")
        return ServedModel(
            name, chat_model, lambda: AloneRows(lambda order: _stream(chat_model, order)), False, threading.Lock()
        )
    return ServedModel(name, chat_model, lambda: TogetherRows(chat_model.model), True, threading.Lock())


def _started(model: PreTrainedModel) -> RolloutEngine:
    engine, own = TransformersRollout(), own_forward_of(model)
    assert own is not None, "its weights are on one device in full"
    for sentence in engine.check(nullcontext(model), own):
        note(sentence)
    return engine


def _stream(chat_model: ChatModel, order: Order) -> Iterator[int]:
    ids_P = torch.tensor(order.ids, device=chat_model.model.device)
    request = RolloutRequest.of_prompt(ids_P, order.sampling, order.seed)
    return chat_model.engine.stream(chat_model.model, request, order.ends)


@dataclass(frozen=True)
class StyledModel:
    """All of a model but its weights: how it is asked. prefix: special tokens before any text. template: the chat
    template; None in another style. end_is_saved: whoever reads the folder stops at `end_token`."""

    name: str
    tokenizer: Any
    data: DataArguments
    dtype: str
    end_token: str
    end_is_saved: bool
    is_adapter: bool

    @property
    def prompt_style(self) -> str:
        return self.data.chat.prompt_style

    @property
    def is_human_assistant(self) -> bool:
        return self.prompt_style == HUMAN_ASSISTANT

    @property
    def frame(self) -> tuple[str, str]:
        """The frame of its prompts (see `SavedStyle`)."""
        saved = saved_style(self.tokenizer)
        return saved.frame if saved else FRAME

    @property
    def template(self) -> str | None:
        return template_text(self.tokenizer, None, self.name) if self.prompt_style == CHAT_TEMPLATE else None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.data.chat.template_kwargs

    @property
    def prefix(self) -> str:
        ids = TextTokenizer(self.tokenizer, self.end_token).prefix_ids
        return self.tokenizer.decode(ids) if ids else ""

    def ids_of(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of a chat, as in training."""
        unloaded: Any = None
        chat_model = ChatModel(self.name, unloaded, unloaded, self.tokenizer, self.data, (0,), frozenset())
        return prompt_of(chat_model, messages).flipped_prompt_ids[::-1].tolist()

    def rendered(self, template: str, messages: Sequence[Message]) -> list[int]:
        """The prompt of a chat as a server makes it that has the template alone."""
        text = self.tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def open_model(path: str, flags: SamplingArguments, chat: ChatArguments) -> StyledModel:
    """Read how a finished model is asked. ThreestepError as of `load_served`."""
    folder = open_chat_folder(path, DataArguments(chat=chat))
    ends = [*saved_stop_tokens(path), folder.tokenizer.eos_token_id]
    dtype = str(dtype_of(path, flags.dtype)).removeprefix("torch.")
    end_token = folder.tokenizer.convert_ids_to_tokens(folder.end_token_id)
    is_adapter = find_adapter(path) is not None
    return StyledModel(path, folder.tokenizer, folder.data, dtype, end_token, folder.end_token_id in ends, is_adapter)
