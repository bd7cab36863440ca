"""The pictures of a prompt, as reward functions are handed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threestep.plugins.images.data.decoding import DecodedPictures

if TYPE_CHECKING:
    from training.utils.contracts.media import SeenMedia
    from training.utils.contracts.rows import PromptRow


def pictures_of(seen: SeenMedia, row: PromptRow) -> DecodedPictures:
    """Return the pictures of a prompt, for a reward to look at. One that is cut up has several spans, of one key."""
    keys = dict.fromkeys(span.key for span in row.media)
    key_of = dict(zip(dict.fromkeys(row.media_digests), keys, strict=True))
    return DecodedPictures(tuple(seen.encoded(key_of[digest]) for digest in row.media_digests))
