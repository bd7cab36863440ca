"""The table of media: what reads those of rows, and what a run does with them. Images are the only kind."""
# ruff: noqa: F401 (what others import from here)

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from training.utils.data.rows.media_store import HeldMedia
from training.utils.images.data.row_pictures import WHY_DROPPED, after_cut
from training.utils.images.run.chat_images import chat_media
from training.utils.images.run.image_reader import (
    check_read_alike,
    check_scored,
    processor_of,
    reader_of_folder,
    reader_of_model,
    why_unread,
    why_unscored,
)
from training.utils.images.run.planned_images import kept_features_line, planned_media
from training.utils.images.run.reward_pictures import media_for_rewards
from training.utils.images.run.row_images import check_beside_images, kept_for_readers, run_media, with_kept_features
from training.utils.images.run.sample_pictures import SamplePictures, keep_media
from training.utils.images.run.sent_images import sent_media

if TYPE_CHECKING:
    from training.utils.contracts.media import MediaReader, ReadsMedia
    from training.utils.data.build.build import PhaseData
    from training.utils.data.kinds.kind import RowKind
    from training.utils.data.sources.arguments import SourceArguments
    from training.utils.images.models.pictured import RowImages
    from training.utils.run.run_folder import RunFolder
    from training.utils.setup.flags import OneModelFlags


def reader_of_start(flags: OneModelFlags, tokenizer: Any) -> dict[str, Any]:
    """Return what `build_phase` takes of media: what reads them for the start model, None where the model or the step
    reads text alone; and why, for the sentence on a row with some."""
    start = (flags.start.name_or_path, flags.start.trust_remote_code)
    reader = reader_of_model(*start, tokenizer) if flags.step.reads_media else None
    return {"media": reader, "unread": why_unread(*start)}


def checked_media(flags: OneModelFlags, rows: PhaseData, kind: RowKind) -> RowImages | None:
    """Return the media of the rows; None without any. ThreestepError if the run cannot train on them."""
    images = run_media(chain(rows.train, rows.eval), rows.seen, kind.document)
    if images is not None:
        check_beside_images(flags.settings)
    return images


def media_keeper(folder: RunFolder, rows: PhaseData) -> SamplePictures | None:
    """Return what keeps media of samples in the run's folder; None where no row has any."""
    return None if rows.seen is None else SamplePictures(folder, rows.seen)


def held_media(reader: MediaReader, source: SourceArguments) -> ReadsMedia:
    """Return what reads media of rows, and holds them in memory."""
    return reader.of_rows(HeldMedia(), source.allow_image_urls)
