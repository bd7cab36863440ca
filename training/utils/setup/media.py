"""Media of rows, for programs: a text has none, and all else is answered by the `MediaKind` of a plugin.

A plugin's kind is imported only for a model that reads more than text, and for rows that have media.
"""

from __future__ import annotations

import functools
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.user_files import named_object
from training.utils.contracts.rows import MEDIA_COLUMN
from training.utils.data.formats.media import ONLY_TEXT
from training.utils.data.rows.media_store import HeldMedia
from training.utils.loading.configurations import load_config
from training.utils.loading.weight_files import model_of
from training.utils.models.families import is_media_config, processor_files
from training.utils.plugins.registry import added, missing_plugin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from training.utils.contracts.documents import Document
    from training.utils.contracts.media import (
        Keep,
        MediaKind,
        MediaReader,
        PlannedMedia,
        Read,
        ReadsMedia,
        RunMedia,
        SeenMedia,
    )
    from training.utils.data.build.build import PhaseData
    from training.utils.data.kinds.kind import RowKind
    from training.utils.flags.added import AddedFlags
    from training.utils.models.settings import ModelSettings
    from training.utils.run.run_folder import RunFolder
    from training.utils.setup.flags import OneModelFlags

_TABLE = "media"  # of plugins


@functools.cache
def media_kind() -> MediaKind:
    """Return the reader of media. Raise ThreestepError if no plugin or several plugins provide one."""
    places = added(_TABLE, ())
    if not places:
        raise ThreestepError(f"{MEDIA_COLUMN}: {missing_plugin(_TABLE, MEDIA_COLUMN)}")
    if len(places) > 1:
        raise ThreestepError(
            f"several plugins read media ({', '.join(places)}), but a program can have only one; uninstall the others"
        )
    [place] = places.values()
    kind: MediaKind = named_object(place)()
    return kind


def has_media_kind() -> bool:
    """True if a plugin reads media."""
    return bool(added(_TABLE, ()))


def _config_with_media(name_or_path: str, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model of more than text; None of one of text alone."""
    config = load_config(name_or_path, trust_remote_code)
    return config if is_media_config(config) else None


def reader_of_model(name_or_path: str, trust_remote_code: bool, tokenizer: Any) -> MediaReader | None:
    """Return what reads media of rows for the model that a run starts from, or an adapter's; None for one that reads
    text alone."""
    path = model_of(name_or_path)
    config = _config_with_media(path, trust_remote_code)
    return None if config is None or not has_media_kind() else media_kind().reader_of(path, config, tokenizer)


def reader_of_folder(name_or_path: str, tokenizer: Any) -> MediaReader | None:
    """Return the reader for a model's folder or hub name, or an adapter's; None for a tokenizer alone, and for a model
    that reads text alone."""
    try:
        path = model_of(name_or_path)
        config = _config_with_media(path)
    except ThreestepError:
        if Path(name_or_path, "config.json").is_dir():
            raise
        return None  # a tokenizer alone
    return None if config is None or not has_media_kind() else media_kind().reader_of(path, config, tokenizer)


def why_unread(name_or_path: str, trust_remote_code: bool = False) -> str:
    """Return why media of rows are not read for a model that has no reader: ends "a row holds media, and ..."."""
    path = model_of(name_or_path)
    try:
        config = _config_with_media(path, trust_remote_code)
    except ThreestepError:  # a tokenizer alone
        config = None
    if not has_media_kind():
        return missing_plugin(_TABLE, MEDIA_COLUMN)
    return ONLY_TEXT if config is None else media_kind().why_unread(config, path)


def reader_of_start(start: ModelSettings, tokenizer: Any) -> dict[str, Any]:
    """Return what `build_phase` takes of media: what reads them for the start model, None where the model or the step
    reads text alone; and why, for the sentence on a row with some."""
    model = (start.name_or_path, start.trust_remote_code)
    reader = reader_of_model(*model, tokenizer) if start.takes_media else None
    return {"media": reader, "unread": why_unread(*model)}


def held_media(reader: MediaReader, flags: AddedFlags) -> ReadsMedia:
    """Return what reads media of rows, and holds them in memory. flags: of plugins, of a program's rows"""
    return reader.of_rows(HeldMedia(), flags)


def run_media(rows: Iterable[Any], seen: SeenMedia | None, document_of: Callable[[Any], Document]) -> RunMedia | None:
    """Return the media of rows; None if no row has any. seen: what was read of them. document_of: makes the layout's
    document of a row."""
    return None if seen is None else media_kind().of_rows(rows, seen, document_of)


def checked_media(flags: OneModelFlags, rows: PhaseData, kind: RowKind) -> RunMedia | None:
    """Return the media of the rows; None without any. ThreestepError if the run cannot train on them."""
    media = run_media(chain(rows.train, rows.eval), rows.seen, kind.document)
    mistakes = Mistakes()
    if media is not None:
        media_kind().check_beside(flags.settings)
        flags.guests.check_media(mistakes)
    mistakes.raise_if_any()
    return media


def kept_mb(media: RunMedia | None, added: AddedFlags) -> int:
    """Return the MiB of host memory for what models make of a run's media."""
    return 0 if media is None else media_kind().kept_mb(added)


def with_kept_features(
    media: RunMedia | None, added: AddedFlags, model: Any, engine: Any, *, read: Read
) -> RunMedia | None:
    """Return the media of a run, or None, as `MediaKind.with_kept_features` does. added: the run's."""
    most_mb = kept_mb(media, added)
    return media and media_kind().with_kept_features(media, most_mb, model, engine, read=read)


def media_keeper(folder: RunFolder, rows: PhaseData) -> Keep | None:
    """Return what keeps media of samples in the run's folder; None where no row has any."""
    return None if rows.seen is None else media_kind().keeper(folder, rows.seen)


def keep_media(folder: RunFolder, seen: SeenMedia | None, rows: Iterable[Any]) -> None:
    """Keep the media of rows whose samples name them already. seen: what was read of the rows' media."""
    if seen is not None:
        media_kind().keep(folder, seen, rows)


def planned_media(name_or_path: str, trust_remote_code: bool, most: int, at_once: int) -> PlannedMedia | None:
    """Return the memory of media in forwards, for rows that have some; None for a model of text. most, at_once: see
    `MediaKind.planned`."""
    if _config_with_media(model_of(name_or_path), trust_remote_code) is None or not has_media_kind():
        return None
    return media_kind().planned(name_or_path, trust_remote_code, most, at_once)


def processor_of(name_or_path: str, model: Any) -> list[Path]:
    """Return the files of what reads media for the model that `model` started from; none of a model of text."""
    return processor_files(model_of(name_or_path)) if is_media_config(model.config) else []


def check_read_alike(paths: tuple[str, str], trust_remote_code: bool, tokenizers: Sequence[Any]) -> None:
    """ThreestepError if actor and critic read media otherwise."""
    actor, critic = (reader_of_model(path, trust_remote_code, own) for path, own in zip(paths, tokenizers, strict=True))
    if actor is not None and critic is not None:
        media_kind().check_read_alike(paths, (actor, critic))
