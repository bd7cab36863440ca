"""The images of a run's rows: some examples by which the model is checked, and what cannot go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from training.utils.layout.documents import Document, unshared
from training.utils.layout.pictures import PixelsOf, RowImages
from training.utils.run.errors import ThreestepError

_LOOKED_AT = 32  # rows with images, of which the shortest become the examples
_EXAMPLES = 2
_NOT_WITH_IMAGES = {
    "neftune_alpha": "noise on the embeddings would hide the places of images",
    "mtp_num_layers": "the head reads embeddings of tokens, which images do not have",
}


def images_of(
    rows: Iterable[Any], pixels_of: PixelsOf | None, document_of: Callable[[Any], Document]
) -> RowImages | None:
    """Return the images of rows, which are read until there are enough examples; None if no row has one.

    document_of: makes the layout's document of a row.
    """
    if pixels_of is None:
        return None
    found = list(islice((document_of(row) for row in rows if row.images), _LOOKED_AT))
    shortest = sorted((unshared(document)[0] for document in found), key=lambda document: document.tokens)
    return RowImages(pixels_of, tuple(_unlike(shortest)[:_EXAMPLES])) if found else None


def check_beside_images(settings: Mapping[str, Any]) -> None:
    """ThreestepError for a flag that does not go with rows with images. settings: the values of all flags by name."""
    for name, reason in _NOT_WITH_IMAGES.items():
        if settings.get(name):
            raise ThreestepError(f"--{name} {settings[name]} does not go with rows that have images: {reason}; use 0")


def _unlike(documents: Sequence[Document]) -> list[Document]:
    """Those whose first image is that of none before them, then the others."""
    keys, first, others = set[int](), list[Document](), list[Document]()
    for document in documents:
        key = document.segments[0].tokens.images[0].key
        (others if key in keys else first).append(document)
        keys.add(key)
    return [*first, *others]
