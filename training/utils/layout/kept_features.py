"""What a frozen vision tower makes of pictures, kept in the host's memory: it runs once for a picture, however many
forwards of a run read it.

Knows no model: what is kept of a picture is a tensor that is joined to those of others along its first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

# A key of `ImageSpan`, and how many spans with it follow each other: the parts of a picture that is cut up, or a
# picture that stands there twice, which is kept as another one.
Picture = tuple[int, int]


def pictures_of(keys: Sequence[int]) -> tuple[Picture, ...]:
    """Return the pictures of spans with these keys, in their order."""
    return tuple((key, len(list(spans))) for key, spans in groupby(keys))


class KeptFeatures:
    """Of pictures, up to `most_bytes`. Those that are read first stay: an epoch reads each picture about as often as
    the others, and would drive all of them out before it reads one again."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._kept: dict[Picture, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, picture: Picture) -> torch.Tensor | None:
        return self._kept.get(picture)

    def keep(self, picture: Picture, features: torch.Tensor) -> None:
        """Keep a copy on the host, if it fits."""
        if picture not in self._kept and self.bytes + features.nbytes <= self.most_bytes:
            self._kept[picture] = features.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self.bytes += features.nbytes


@dataclass(frozen=True)
class KnownPictures:
    """The pictures of a micro-batch, of which some are kept.

    pictures: in the order of `TokenRows.images`. lengths: of what is kept of each, along its first dimension; None for
        one whose pixels are given instead, once, where it stands first.
    features: of those that are kept, joined in their order; None if none is.
    store: keeps what is made of the others.
    """

    pictures: tuple[Picture, ...]
    lengths: tuple[int | None, ...]
    features: torch.Tensor | None
    store: KeptFeatures

    @property
    def missing(self) -> tuple[Picture, ...]:
        """The different ones that are not kept, in the order in which they stand first."""
        lacking = (picture for picture, length in zip(self.pictures, self.lengths, strict=True) if length is None)
        return tuple(dict.fromkeys(lacking))


def known_pictures(keys: Sequence[int], store: KeptFeatures) -> KnownPictures:
    """Return what is known of spans with these keys."""
    pictures = pictures_of(keys)
    found = [store.find(picture) for picture in pictures]
    kept = [features for features in found if features is not None]
    lengths = tuple(None if features is None else len(features) for features in found)
    return KnownPictures(pictures, lengths, torch.cat(kept) if kept else None, store)
