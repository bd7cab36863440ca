"""From flags to a service that answers, and the thread that computes for it."""

from __future__ import annotations

import threading
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from threestep.plugins.evaluation.model import load_chat_folder, open_chat_folder, start_alone
from threestep.plugins.ragged.check import why_no_media_in_turns, why_not_in_turns
from threestep.plugins.tinker.adapters import AdaptedModel
from threestep.plugins.tinker.forward import Forwards
from threestep.plugins.tinker.sampling import DrawnMedia, Sampler
from threestep.plugins.tinker.service import ServedBase, TrainingService
from threestep.plugins.tinker.store import Store
from threestep.plugins.tinker.trainer import Trainer
from threestep.plugins.tinker.wire import RequestBounds, forward_answer, messages
from training.utils.base.console import note
from training.utils.data.arguments import DataArguments
from training.utils.models.layout_check import check_padded
from training.utils.models.own_forward import own_forward_of
from training.utils.models.token_model import PolicyModel
from training.utils.setup.media import media_kind, reader_of_model, why_unread

if TYPE_CHECKING:
    from threestep.plugins.tinker.request_queue import Desk

_DRAWING_SECONDS = 0.05  # between two looks for training requests
_GATHERING_SECONDS = 0.002
_IDLE_SECONDS = 0.5
_GAPS_SECONDS = 30.0


class ServerSettings(NamedTuple):
    """tokens: of a micro-batch. rows: drawn together. waiting: sequences that wait. is_full: all weights train."""

    tokens: int
    rows: int
    waiting: int
    is_full: bool = False


class Computing:
    """The thread that computes: one, so that a client's requests are done in their order."""

    def __init__(self, desk: Desk, trainer: Trainer, sampler: Sampler) -> None:
        self._desk, self._trainer, self._sampler = desk, trainer, sampler
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="computing", daemon=True)

    def start(self) -> None:
        """Begin to compute."""
        self._thread.start()

    def close(self) -> None:
        """End behind the present turn. What was not done is on disk."""
        self._closed = True
        self._desk.wake()
        self._thread.join()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._closed:
            arrivals = self._desk.arrivals
            try:
                did_some = self._trainer.turn()
                did_some |= self._sampler.turn(_DRAWING_SECONDS)
                if time.monotonic() - looked > _GAPS_SECONDS:
                    looked = time.monotonic()
                    self._desk.fail_gaps()
            except Exception as problem:  # noqa: BLE001 - such as a full disk: tried again, and no answer until then
                traceback.print_exception(problem)
                time.sleep(1.0)
                continue
            if not did_some:
                self._desk.sleep(arrivals, _GATHERING_SECONDS if self._trainer.is_gathering else _IDLE_SECONDS)


def open_service(
    path: str, name: str, output_dir: str, *, dtype: str | None, settings: ServerSettings
) -> tuple[TrainingService, Computing]:
    """Load a base model and the state of earlier clients. ThreestepError where the model cannot be read or trained."""
    messages()
    ranks = start_alone()
    folder = open_chat_folder(path, DataArguments(), with_media=False)
    reader = reader_of_model(path, False, folder.tokenizer)
    media = None if reader is None else media_kind().of_clients(reader, folder.tokenizer)
    if reader is not None:
        note(f"{path}: {reader.sentence}")
    run = None if media is None else media.run
    chat_model = load_chat_folder(replace(folder, reader=reader), dtype, ranks.device, media=run)
    model: Any = chat_model.model
    read = PolicyModel(model)
    check_padded(model, lambda rows: read(rows).logprobs_M, ranks.device)
    tokenizer = str(Path(path).resolve()) if Path(path).is_dir() else path
    base = {"name": name, "dtype": str(model.dtype).removeprefix("torch.")}
    base["trains"] = "all weights" if settings.is_full else "adapters"
    vocabulary = model.config.get_text_config().vocab_size
    bounds = RequestBounds(vocabulary, chat_model.positions, media, why_unread(path) if media is None else "")
    return service_of(
        model,
        Store(Path(output_dir), base),
        settings,
        tokenizer=tokenizer,
        name=name,
        bounds=bounds,
        decode=chat_model.tokenizer.decode,
        ends=frozenset(chat_model.chat_ends),
    )


def service_of(
    model: Any,
    store: Store,
    settings: ServerSettings,
    *,
    tokenizer: str,
    name: str,
    bounds: RequestBounds,
    decode: Any,
    ends: frozenset[int],
) -> tuple[TrainingService, Computing]:
    """The same of a model that is loaded."""
    adapted = AdaptedModel(model)
    media = bounds.media
    padding = 0 if media is None or media.placeholder_id else 1  # a medium's token would be one without content
    forwards = Forwards(adapted, padding, settings.tokens, media)
    own = own_forward_of(model)
    assert own is not None, "its weights are on one device in full"
    reason = why_not_in_turns(model, own, False)
    if reason is not None:
        note(f"{name}: this server does not generate with this model: {reason}")
    with_media = None
    if media is not None:
        why_not = reason or why_no_media_in_turns(model, own)
        with_media = DrawnMedia((media.placeholder_id,), why_not)
        if why_not is not None and reason is None:
            note(f"{name}: this server does not generate from prompts with {media.run.name}: {why_not}")
    sampler = Sampler(
        adapted, forwards, decode, ends, most_rows=settings.rows, no_batches=reason, with_media=with_media
    )

    move = partial(torch.Tensor.to, device=model.device)
    base = ServedBase(name, tokenizer, bounds, settings.waiting, adapted.layout, adapted.new, move, settings.is_full)
    service = TrainingService(base, store, sampler)
    trainer = Trainer(
        service.desk,
        forwards,
        store,
        base=name,
        written=forward_answer,
        open_sampler=service.open_sampler,
        move=move,
    )
    return service, Computing(service.desk, trainer, sampler)
