"""Images as a kind of media: what the core asks of them, answered by the rooms of this plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.images.data.decoding import encoded
from threestep.plugins.images.data.reader import ImageReader, PixelReader, open_image_reader, unread_because
from threestep.plugins.images.data.row_pictures import WHY_DROPPED
from threestep.plugins.images.flags import ImageArguments
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.images.recorded import PixelScale, RecordedImages, images_of_rank, scale_of
from threestep.plugins.images.run.chat_images import Picture, chat_media, open_picture
from threestep.plugins.images.run.image_reader import check_read_alike, why_unscored
from threestep.plugins.images.run.planned_images import PlannedImages, planned_images
from threestep.plugins.images.run.reward_pictures import pictures_of
from threestep.plugins.images.run.row_images import (
    check_beside_images,
    kept_for_readers,
    row_images,
    with_kept_features,
)
from threestep.plugins.images.run.sample_pictures import SamplePictures, keep_pictures
from threestep.plugins.images.run.sent_images import SentImages
from training.utils.contracts.media import MediaKind
from training.utils.contracts.rows import MEDIA_COLUMN

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from training.utils.contracts.documents import Document
    from training.utils.contracts.media import Keep, MediaReader, Read, ReadsMedia, RunMedia, SeenMedia
    from training.utils.flags.added import AddedFlags


class Images(MediaKind):
    """See `MediaKind`, whose methods these are."""

    why_dropped = WHY_DROPPED

    def reader_of(self, name_or_path: str, config: Any, tokenizer: Any) -> ImageReader | None:
        return open_image_reader(name_or_path, config, tokenizer)

    def why_unread(self, config: Any, name_or_path: str) -> str:
        return unread_because(config, name_or_path)

    def of_rows(self, rows: Iterable[Any], seen: SeenMedia, document_of: Callable[[Any], Document]) -> RowImages | None:
        return row_images(rows, _pixels(seen), document_of)

    def check_beside(self, settings: Mapping[str, Any]) -> None:
        check_beside_images(settings)

    def kept_mb(self, added: AddedFlags) -> int:
        return added.of(ImageArguments).kept_image_features_mb

    def with_kept_features(self, media: RunMedia, most_mb: int, model: Any, engine: Any, *, read: Read) -> RowImages:
        return with_kept_features(_images(media), most_mb, model, engine, read=read)

    def kept_for_readers(
        self,
        media: RunMedia,
        most_mb: int,
        engine: Any,
        readers: Mapping[str, tuple[Any, Read]],
        *,
        log: Callable[..., None],
    ) -> RowImages:
        return kept_for_readers(_images(media), most_mb, engine, readers, log=log)

    def planned(self, name_or_path: str, trust_remote_code: bool, most: int, at_once: int) -> PlannedImages | None:
        return planned_images(name_or_path, trust_remote_code, most, at_once)

    def keeper(self, folder: Any, seen: SeenMedia) -> Keep:
        return SamplePictures(folder, seen).names

    def keep(self, folder: Any, seen: SeenMedia, rows: Iterable[Any]) -> None:
        keep_pictures(folder, seen, rows)

    def for_rewards(self, seen: SeenMedia, row: Any) -> dict[str, Any]:
        return {MEDIA_COLUMN: pictures_of(seen, row)}

    def of_chat(self, reader: MediaReader, data: Any, tokenizer: Any) -> tuple[ReadsMedia, RowImages]:
        return chat_media(_reader(reader), data, tokenizer)

    def of_clients(self, reader: MediaReader, tokenizer: Any) -> SentImages:
        return SentImages(_reader(reader), tokenizer)

    def why_unscored(
        self, name_or_path: str, tokenizer: Any, reader: MediaReader | None, sides: Sequence[tuple[Any, MediaReader]]
    ) -> str | None:
        return why_unscored(name_or_path, tokenizer, reader, sides)

    def check_read_alike(self, paths: tuple[str, str], readers: tuple[MediaReader, MediaReader]) -> None:
        check_read_alike(paths, readers)

    def opened_file(self, given: str) -> Picture:
        return open_picture(given)

    def encoded(self, value: Any, where: str) -> bytes:
        return encoded(value, where)

    def recorded(self, rank: Mapping[str, np.ndarray]) -> dict[int, RecordedImages]:
        return images_of_rank(rank)

    def scale_of(self, folder: Path) -> PixelScale | None:
        return scale_of(folder)


def _reader(reader: MediaReader) -> ImageReader:
    assert isinstance(reader, ImageReader)
    return reader


def _pixels(seen: SeenMedia) -> PixelReader:
    assert isinstance(seen, PixelReader)
    return seen


def _images(media: RunMedia) -> RowImages:
    assert isinstance(media, RowImages)
    return media
