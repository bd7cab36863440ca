"""A finished model: its prompt for a conversation, and its answer, word by word.

Prompts are rendered by the data room, as step 3 renders those made during a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from training.utils.base.console import note
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rollout_engine import (
    Drawing,
    Ends,
    RolloutEngine,
    RolloutRequest,
    RolloutSettings,
    Sampling,
    rolled_out,
)
from training.utils.data.build.row_maker import PromptMaker
from training.utils.data.chat.style import adopt_style
from training.utils.data.rows.arguments import AS_STORED, CHAT_TEMPLATE, HUMAN_ASSISTANT
from training.utils.data.rows.tokenize import end_of_conversation_id
from training.utils.engine.ranks.devices import device_of, set_threads
from training.utils.engine.ranks.startup import DTYPES, Ranks
from training.utils.flags.flags import settings_of
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.generation.table import checked_engine
from training.utils.loading.configurations import load_config, positions_of
from training.utils.loading.models import load_causal_lm
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.models.families import placeholder_id
from training.utils.models.own_forward import own_forward_of
from training.utils.models.settings import ModelSettings
from training.utils.models.stop_tokens import joined_stop_tokens, stop_tokens, unused_stop_tokens
from training.utils.setup.media import media_kind, reader_of_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.drawing import OpenedForm, TextForm
    from training.utils.contracts.media import MediaReader, ReadsMedia, RunMedia
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rows import PromptRow
    from training.utils.data.arguments import DataArguments
    from training.utils.data.formats.messages import Message
    from training.utils.generation.arguments import SamplingArguments
    from training.utils.generation.table import RolloutEngineFlags

_NO_BOUND_TOKENS = 2**30


@dataclass(frozen=True)
class Trajectory:
    """An answer of several turns, with tools or an environment.

    messages: of the model and of its environment, so far; the rest once the answer is complete.
    reward: the sum of all turns; None where only tools answer. cut: the limit that ended it. figures: by name.
    """

    messages: tuple[Message, ...]
    turns: int = 0
    reward: float | None = None
    cut: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """Facts of a complete answer beside its text, in words."""
        parts = [f"{self.turns} turn{'s' if self.turns > 1 else ''}"]
        parts += [] if self.reward is None else [f"reward {self.reward:g}"]
        parts += [f"{name} {value:.3g}" for name, value in self.figures.items() if value]
        parts += [] if self.cut is None else [f"cut off by the limit on {self.cut}"]
        return ", ".join(parts) if self.turns else ""


@dataclass(frozen=True)
class Answer:
    """An answer, or its beginning while it is being written.

    text: without the end token.
    token_ids: with the end token, if `ended`.
    ended: False if max_new_tokens cut it.
    positions: its tokens, of which the longest path of each block counts alone; None where it was drawn in one piece.
    paths: of each block, how many were drawn side by side.
    trajectory: of a conversation with tools or an environment, whose text shows their messages; else None.
    """

    text: str
    token_ids: tuple[int, ...]
    ended: bool
    positions: int | None = None
    paths: tuple[int, ...] = ()
    trajectory: Trajectory | None = None

    @property
    def note(self) -> str:
        """Facts of parallel paths, or of a conversation, in words; "" for a plain answer."""
        if self.trajectory is not None:
            return self.trajectory.sentence
        each = ", ".join(map(str, self.paths))
        return each and f"parallel paths per block: {each}; {len(self.token_ids)} tokens in {self.positions} positions"


@dataclass(frozen=True)
class ChatModel:
    """data: with the prompt style of this model.
    more_end_tokens: the model's stop tokens, at which an answer in a chat ends too.
    end_token_ids: at which a drawn answer ends, as in step 3; the first is a response's `end_token_id`.
    form: in which it answers, as in step 3; None: in one run of tokens.
    media: of the prompts; None without any.
    reads: reads the media of messages; None for rows of a dataset, and without media.
    """

    name: str
    model: PreTrainedModel
    engine: RolloutEngine
    tokenizer: Any
    data: DataArguments
    end_token_ids: tuple[int, ...]
    more_end_tokens: frozenset[int]
    form: OpenedForm | None = None
    media: RunMedia | None = None
    reads: ReadsMedia | None = None

    @property
    def end_token_id(self) -> int:
        return self.end_token_ids[0]

    def message_text(self, answer: Answer) -> str:
        """The answer's text as a message: as it is, but for the spaces around it that belong to "Human: ...
        Assistant:"."""
        return answer.text.strip() if self.data.chat.prompt_style == HUMAN_ASSISTANT else answer.text

    @property
    def reads_as_stored(self) -> bool:
        """True if it is asked one question at a time, exactly as it is typed."""
        return self.data.chat.prompt_style == AS_STORED

    def messages_of(self, answer: Answer) -> list[Message]:
        """The answer as messages."""
        if answer.trajectory is not None:
            return list(answer.trajectory.messages)
        return [{"role": "assistant", "content": self.message_text(answer)}]

    @property
    def chat_ends(self) -> tuple[int, ...]:
        """Each ends an answer in a chat; the first is `end_token_id`."""
        return self.end_token_id, *sorted(self.more_end_tokens - {self.end_token_id})

    def room_behind(self, prompt_tokens: int, most: int) -> int:
        """Return how many tokens an answer may have, `most` at most; ThreestepError if there is no room for any."""
        if self.positions is None:
            return most
        if prompt_tokens >= self.positions:
            raise ThreestepError(
                f"the conversation has {prompt_tokens} tokens, which leaves no room for an answer in the "
                f"{self.positions} positions of '{self.name}'; type /reset to start a new conversation"
            )
        return min(most, self.positions - prompt_tokens)

    @property
    def positions(self) -> int | None:
        """The longest prompt with its answer; None if unbounded."""
        bounds = [bound for bound in (positions_of(self.model.config), self.engine.longest_tokens) if bound is not None]
        return min(bounds, default=None)

    def sampling(self, flags: SamplingArguments) -> Sampling:
        pad_id = self.tokenizer.pad_token_id
        more = self.end_token_ids[1:]
        # As in step 3: in an answer, the token that stands for media would be one without content.
        words = () if self.media is None else ((placeholder_id(self.model.config),),)
        return settings_of(
            Sampling,
            flags,
            end_token_id=self.end_token_id,
            pad_token_id=pad_id,
            ends=Ends(token_ids=more),
            form=self.form,
            bad_words=words,
        )

    def media_of(self, rows: Sequence[PromptRow]) -> Any:
        """Media of these prompts, for a request for answers to them."""
        return None if self.media is None else self.media.of_prompts([row.media for row in rows])

    def answers_of(self, rollout: Rollout, end_token_ids: Collection[int]) -> list[Answer]:
        """The drawn responses."""
        texts, found = rollout.texts(self.tokenizer.decode, end_token_ids), []
        for row, text in enumerate(texts):
            ids_r = rollout.response_of(row)
            paths, positions = tuple[int, ...](), None
            if rollout.formed is not None and self.form is not None:
                paths = self.form.parts_of(ids_r)
                positions = int(rollout.formed.positions_B[row])
            found.append(Answer(text, tuple(ids_r.tolist()), bool(rollout.ended_B[row]), positions, paths))
        return found


def start_alone() -> Ranks:
    """Silence transformers' log; return a rank that computes for itself, on the GPU of its number on this host
    (LOCAL_RANK), if there is one. Ranks share a host's cores out as threads."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    set_threads(os.environ, int(os.environ.get("WORLD_SIZE", "1")))
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device_of(int(os.environ.get("LOCAL_RANK", "0")), visible)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Ranks(0, 0, 1, device)


def engine_maker(
    flags: SamplingArguments,
    engines: RolloutEngineFlags,
    longest_tokens: int,
    form: TextForm | None = None,
    *,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[PreTrainedModel], RolloutEngine]:
    """Return a function that starts --rollout_engine with a finished model's weights. Raises ThreestepError, before a
    model loads, if the engine is unknown, not installed or unfit.

    longest_tokens: of a prompt with its answer. form: of the answers. more: further flags that the engine
        has to support, with their values.
    """
    mistakes = Mistakes()
    engine = checked_engine(flags.rollout_engine, {"min_p": flags.min_p, **more}, mistakes, form)
    engines.refuse_others(flags.rollout_engine, mistakes)
    mistakes.require(
        engine is None or not engine.for_training_only,
        f"--rollout_engine {flags.rollout_engine} is for training only; use another engine, such as hf",
    )
    mistakes.raise_if_any()
    assert engine is not None  # an unknown name is a mistake
    drawing, processes = Drawing(form=form), int(os.environ.get("WORLD_SIZE", "1"))
    settings = RolloutSettings(longest_tokens, engines.of(engine.arguments), beside_training=False, processes=processes)
    mistakes.sentences += engine.refusals(settings, drawing)
    mistakes.raise_if_any()

    def started(model: PreTrainedModel) -> RolloutEngine:
        longest = min(longest_tokens, positions_of(model.config) or longest_tokens)
        made = engine.create(None, replace(settings, longest_tokens=longest))
        made.take_weights(model, model.named_parameters())
        own = own_forward_of(model)
        assert own is not None  # its weights are whole
        for sentence in made.check(nullcontext(model), own, drawing):
            note(sentence)
        return made

    return started


@dataclass(frozen=True)
class ChatFolder:
    """All of a finished model but its weights, as `ChatModel` has it. reader: of media; None if the model reads text
    alone, or has no chat template."""

    name: str
    tokenizer: Any
    data: DataArguments
    end_token_id: int
    reader: MediaReader | None


def open_chat_folder(name_or_path: str, data: DataArguments, *, with_media: bool = True) -> ChatFolder:
    """Read a model's tokenizer, and print its prompt style to standard error. ThreestepError if it cannot have data's
    prompt style. with_media: False where the caller opens its reader of media, or needs none."""
    tokenizer = load_tokenizer(name_or_path, end_may_pad=True)
    style = adopt_style(tokenizer, data.chat)
    note(f"{name_or_path}: {style.sentence}")
    if style.chat.prompt_style == AS_STORED:
        note(f"{name_or_path}: each question is sent alone, without earlier turns, as in the training rows")
    end_id, reader = end_of_conversation_id(tokenizer, style.end_token), None
    if with_media and style.chat.prompt_style == CHAT_TEMPLATE:
        reader = reader_of_model(name_or_path, False, tokenizer)
    return ChatFolder(name_or_path, tokenizer, replace(data, chat=style.chat), end_id, reader)


def load_chat_folder(
    folder: ChatFolder,
    dtype: str | None,
    device: torch.device,
    start_engine: Callable[[PreTrainedModel], RolloutEngine] = lambda model: TransformersRollout(),
    *,
    media: RunMedia | None = None,
    reads: ReadsMedia | None = None,
) -> ChatModel:
    """Load the weights. media, reads: see `ChatModel`."""
    name, tokenizer = folder.name, folder.tokenizer
    settings = ModelSettings(name, takes_media=folder.reader is not None)
    model: Any = load_causal_lm(settings, dtype_of(name, dtype), len(tokenizer), device=device, media=media)
    model = model.to(device).eval().requires_grad_(False)
    own = stop_tokens(model)
    more = frozenset(own or [tokenizer.eos_token_id])
    ends = tuple(joined_stop_tokens(own, tokenizer, [folder.end_token_id]))
    unused = unused_stop_tokens(own, tokenizer)
    if unused is not None:
        note(f"{name}: {unused}")
    form = folder.data.opened_form(tokenizer)
    engine = start_engine(model)
    chat_model = ChatModel(name, model, engine, tokenizer, folder.data, ends, more, form)
    return replace(chat_model, media=media, reads=reads)


def load_chat_model(
    name_or_path: str,
    dtype: str | None,
    data: DataArguments,
    device: torch.device,
    *,
    start_engine: Callable[[PreTrainedModel], RolloutEngine] = lambda model: TransformersRollout(),
    with_media: bool = True,
) -> ChatModel:
    """Load a language model and its tokenizer for a conversation. ThreestepError as of `open_chat_folder`.

    with_media: of a model that reads media, those of messages are read.
    """
    folder = open_chat_folder(name_or_path, data)
    if folder.reader is None or not with_media:
        return load_chat_folder(replace(folder, reader=None), dtype, device, start_engine)
    reads, media = media_kind().of_chat(folder.reader, folder.data, folder.tokenizer)
    return load_chat_folder(folder, dtype, device, start_engine, media=media, reads=reads)


def dtype_of(name_or_path: str, flag: str | None) -> torch.dtype:
    """The torch dtype of `--dtype`, or if None that of the saved weights (float32 if unknown)."""
    if flag is not None:
        return DTYPES[flag]
    saved = getattr(load_config(name_or_path), "dtype", None)
    return saved if isinstance(saved, torch.dtype) else torch.float32


def prompt_of(chat_model: ChatModel, messages: Sequence[Message]) -> PromptRow:
    """The prompt for the next answer. ThreestepError if the messages make none."""
    data = replace(chat_model.data, rows=replace(chat_model.data.rows, max_prompt_seq_len=_NO_BOUND_TOKENS))
    row = PromptMaker(data, chat_model.tokenizer, chat_model.reads).make(list(messages), None, 0)
    if row is None:
        raise ThreestepError(
            f"the conversation is empty, so there is no prompt for '{chat_model.name}'; type a message"
        )
    return row


def stream_answer(
    chat_model: ChatModel, messages: Sequence[Message], flags: SamplingArguments, seed: int
) -> Iterator[Answer]:
    """Yield the answer as it grows, one with a form once it is complete; the last one is complete. Equal seeds
    give equal answers.

    The model's positions limit it too. ThreestepError if the prompt leaves no room for an answer.
    """
    prompt = prompt_of(chat_model, messages)
    prompt_ids = prompt.flipped_prompt_ids[::-1].copy()
    flags = replace(flags, max_new_tokens=chat_model.room_behind(len(prompt_ids), flags.max_new_tokens))
    ends = chat_model.chat_ends
    ids: list[int] = []
    prompt_ids_P = torch.tensor(prompt_ids, dtype=torch.int64, device=chat_model.model.device)
    sampling = chat_model.sampling(flags)
    request = replace(RolloutRequest.of_prompt(prompt_ids_P, sampling, seed), media=chat_model.media_of([prompt]))
    if sampling.form is not None:
        request = replace(request, sampling=replace(sampling, ends=Ends(token_ids=ends[1:])))
        rollout = rolled_out(chat_model.engine, chat_model.model, request)
        yield from chat_model.answers_of(rollout, request.sampling.end_token_ids)
        return
    for token in chat_model.engine.stream(chat_model.model, request, chat_model.more_end_tokens):
        ids.append(token)
        ended = token in ends
        text = chat_model.tokenizer.decode(ids[:-1] if ended else ids)
        last = ended or len(ids) == flags.max_new_tokens
        # A character of several tokens is shown once it is complete.
        yield Answer(text if last else text.rstrip("\ufffd"), tuple(ids), ended)


def check_room(chat_model: ChatModel, longest_tokens: int, flags: str) -> None:
    """ThreestepError if `longest_tokens`, which `flags` allow, exceeds the model's positions."""
    if chat_model.positions is not None and longest_tokens > chat_model.positions:
        raise ThreestepError(
            f"{flags} allow {longest_tokens} tokens, more than the {chat_model.positions} positions of "
            f"'{chat_model.name}'; lower them"
        )
