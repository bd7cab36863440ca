"""The pictures of a prompt, as reward functions are handed them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.utils.contracts.media_names import MEDIA_COLUMN
from training.utils.images.data.decoding import DecodedPictures

if TYPE_CHECKING:
    from training.utils.contracts.media import SeenMedia
    from training.utils.contracts.rows import PromptRow


def media_for_rewards(seen: SeenMedia, row: PromptRow) -> dict[str, Any]:
    """Return the column `images` of a prompt for reward functions."""
    return {MEDIA_COLUMN: pictures_of(seen, row)}


def pictures_of(seen: SeenMedia, row: PromptRow) -> DecodedPictures:
    """Return the pictures of a prompt, for a reward to look at. One that is cut up has several spans, of one key."""
    keys = dict.fromkeys(span.key for span in row.media)
    key_of = dict(zip(dict.fromkeys(row.picture_digests), keys, strict=True))
    return DecodedPictures(tuple(seen.encoded(key_of[digest]) for digest in row.picture_digests))
