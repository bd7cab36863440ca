"""The images of a run's rows: some examples by which the model is checked, and what cannot go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.images.kept_features import KeptFeatures
from threestep.plugins.images.models.kept_features import forget_feature_reader, open_feature_reader
from threestep.plugins.images.models.pictured import RowImages
from training.utils.base.errors import ThreestepError
from training.utils.base.transfer import moved
from training.utils.contracts.documents import Document, unshared
from training.utils.layout.rows import packed_rows
from training.utils.models.own_forward import own_forward_of, rms

if TYPE_CHECKING:
    from threestep.plugins.images.prompts import PixelsOf
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.training_engine import TrainingEngine

_LOOKED_AT = 32  # rows with images, of which the shortest become the examples
_EXAMPLES = 2
_NOT_WITH_IMAGES = {"neftune_alpha": "noise on the embeddings would hide the places of images"}


def row_images(rows: Iterable[Any], pixels_of: PixelsOf, document_of: Callable[[Any], Document]) -> RowImages | None:
    """Return the images of rows, which are read until there are enough examples; None if no row has one.

    document_of: makes the layout's document of a row.
    """
    found = list(islice((document_of(row) for row in rows if row.media), _LOOKED_AT))
    shortest = sorted((unshared(document)[0] for document in found), key=lambda document: document.tokens)
    return RowImages(pixels_of, tuple(_unlike(shortest)[:_EXAMPLES])) if found else None


def check_beside_images(settings: Mapping[str, Any]) -> None:
    """ThreestepError for a flag that does not go with rows with images. settings: the values of all flags by name."""
    for name, reason in _NOT_WITH_IMAGES.items():
        if settings.get(name):
            raise ThreestepError(f"--{name} {settings[name]} does not work with rows that have images: {reason}; use 0")


def with_kept_features(
    images: RowImages,
    most_mb: int,
    model: Any,
    engine: TrainingEngine,
    *,
    read: Callable[[TokenRows], torch.Tensor],
    evicts: bool = False,
) -> RowImages:
    """Return the images with up to `most_mb` MiB of features kept, once `model` has read some rows so and otherwise.

    most_mb: `--kept_image_features_mb`. engine: of `model`. read: numbers of rows by it. evicts: see `KeptFeatures`.
    ThreestepError for a model that cannot.
    """
    if not most_mb:
        return images
    engine.eval()
    kept = replace(images, kept=KeptFeatures(most_mb * 2**20, evicts))
    reason = why_not_kept(kept, model, read, engine.ranks.device)
    if reason is not None:
        raise ThreestepError(
            f"--kept_image_features_mb {most_mb} does not work with this {type(model).__name__}: {reason}; remove it"
        )
    return kept


def why_not_kept(
    images: RowImages,
    model: Any,
    read: Callable[[TokenRows], torch.Tensor],
    device: torch.device,
    *,
    shares: Any = None,
) -> str | None:
    """Have `model` read the features of these images that are kept, where it reads some rows so and otherwise alike;
    or return why it cannot. model: in eval mode. shares: a model that reads them already."""
    pixels = replace(images, kept=None)
    example = pixels.pixels_of([image.key for image in images.alone.segments[0].tokens.media])
    reason = open_feature_reader(model, moved(example, device), shares)
    if reason is not None:
        return reason
    rows = packed_rows([[document] for document in images.examples], 0)
    own = own_forward_of(model)
    assert own is not None and own.with_media is not None, "it was measured when it was loaded"
    with torch.no_grad():
        plain_M, made_M, again_M = (read(of.loaded(rows).to(device)) for of in (pixels, images, images))
    difference = max(rms((other_M - plain_M).double()) for other_M in (made_M, again_M))
    if difference <= own.with_media.tolerance:
        return None
    forget_feature_reader(model)
    return f"with kept features, its results differ by {difference:.2g}"


def kept_for_readers(
    images: RowImages,
    most_mb: int,
    engine: TrainingEngine,
    readers: Mapping[str, tuple[Any, Callable[[TokenRows], torch.Tensor]]],
    *,
    log: Callable[..., None],
) -> RowImages:
    """Return the images with up to `most_mb` MiB of the features of the first reader's tower stored. The other models
    read them if their vision tower has the same weights, which is logged, and pixels if not. ThreestepError if the
    first cannot.

    engine: of the first. readers: by name, each a model and numbers of rows by it.
    """
    (first, (owner, read)), *others = readers.items()
    stored = with_kept_features(images, most_mb, owner, engine, read=read, evicts=True)
    device, is_main, found = engine.ranks.device, engine.ranks.is_main, [first]
    for name, (model, read) in others:
        reason = why_not_kept(stored, model, read, device, shares=owner)
        if reason is None:
            found.append(name)
        else:
            log(f"the {name} runs on pixels instead of kept features: {reason}", is_main)
    log(f"keeping up to {most_mb} MiB of image features for: {', '.join(found)}", is_main)
    return stored


def _unlike(documents: Sequence[Document]) -> list[Document]:
    """Those whose first image is that of none before them, then the others."""
    keys, first, others = set[int](), list[Document](), list[Document]()
    for document in documents:
        key = document.segments[0].tokens.media[0].key
        (others if key in keys else first).append(document)
        keys.add(key)
    return [*first, *others]
