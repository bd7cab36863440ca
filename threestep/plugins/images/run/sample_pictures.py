"""Small copies of the pictures that samples show, kept beside samples.jsonl, which has their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from training.utils.contracts.rows import SAMPLE_MEDIA

if TYPE_CHECKING:
    from training.utils.contracts.documents import MediaSpan
    from training.utils.contracts.media import SeenMedia
    from training.utils.contracts.rows import PromptRow
    from training.utils.run.run_folder import RunFolder

LONGEST_SIDE = 128  # pixels
MOST_PICTURES = 1000  # of a run; of further ones samples have the names alone


class SamplePictures:
    """Keeps the pictures of one run; a resumed run goes on with those that are there."""

    def __init__(self, folder: RunFolder, pixels: SeenMedia) -> None:
        self._folder = folder
        self._pixels = pixels
        self._kept = {path.stem for path in (folder.path / SAMPLE_MEDIA).glob("*.png")}

    def has(self, names: Iterable[str]) -> bool:
        """True if all of these are kept."""
        return self._kept.issuperset(names)

    def names(self, spans: Sequence[MediaSpan]) -> list[str]:
        """Keep the pictures of a row, and return their names in the order of its images."""
        found = []
        for image in self._pixels.shown(spans):
            found.append(image.name)
            if image.name not in self._kept and len(self._kept) < MOST_PICTURES:
                self._kept.add(image.name)
                self._folder.write_medium(f"{image.name}.png", image.small(LONGEST_SIDE), "picture")
        return found


def keep_pictures(folder: RunFolder, pixels: SeenMedia, rows: Iterable[PromptRow]) -> None:
    """Keep the pictures of rows whose samples name them already, by `media_digests`."""
    if not folder.is_main_rank:
        return
    kept = SamplePictures(folder, pixels)
    for row in islice(rows, MOST_PICTURES):
        if not kept.has(row.media_digests):
            kept.names(row.media)
