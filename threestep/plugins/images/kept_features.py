"""Features of pictures by a frozen vision tower, kept in the host's memory: it runs once for a picture, however many
forwards of a run read it.

Knows no model: what is kept of a picture is a tensor that is joined to those of others along its first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from threading import Lock
from typing import Any

import torch

# A key of `MediaSpan`, and how many spans with it follow each other: the parts of a picture that is cut up, or a
# picture that stands there twice, which is kept as another one.
Picture = tuple[int, int]


def pictures_of(keys: Sequence[Sequence[int]]) -> tuple[Picture, ...]:
    """Return the pictures of spans with these keys, of each document, in their order."""
    return tuple((key, len(list(spans))) for own in keys for key, spans in groupby(own))


class KeptFeatures:
    """Features of pictures, up to `most_bytes`.

    Those that are read first stay: an epoch reads each picture about as often as the others, and would drive all of
    them out before it reads one again. evicts: those that were read longest ago go instead, for step 3, where a rollout
    reads its pictures several times, and then none of them for an epoch.
    """

    def __init__(self, most_bytes: int, evicts: bool = False) -> None:
        self.most_bytes = most_bytes
        self.evicts = evicts
        self.bytes = 0
        self._kept: dict[Picture, torch.Tensor] = {}
        self._lock = Lock()  # rows are laid out ahead, in a thread of their own

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, picture: Picture) -> torch.Tensor | None:
        with self._lock:
            features = self._kept.get(picture)
            if features is not None and self.evicts:  # the last of a dictionary is the newest
                self._kept[picture] = self._kept.pop(picture)
            return features

    def keep(self, picture: Picture, features: torch.Tensor) -> None:
        """Keep a copy on the host, if it fits."""
        with self._lock:
            if picture in self._kept or features.nbytes > self.most_bytes:
                return
            while self.evicts and self.bytes + features.nbytes > self.most_bytes:
                self.bytes -= self._kept.pop(next(iter(self._kept))).nbytes
            if self.bytes + features.nbytes <= self.most_bytes:
                self._kept[picture] = features.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                self.bytes += features.nbytes


@dataclass(frozen=True)
class KnownPictures:
    """The pictures of a micro-batch, of which some are kept.

    pictures: in the order of `RowMedia.images`. lengths: of what is kept of each, along its first dimension; None for
        one whose pixels are given instead, once, where it stands first.
    features: of those that are kept, joined in their order; None if none is.
    store: keeps what is made of the others. all_pixels: decodes the pixels of all, for a model that reads no features
        of this store.
    """

    pictures: tuple[Picture, ...]
    lengths: tuple[int | None, ...]
    features: torch.Tensor | None
    store: KeptFeatures
    all_pixels: Callable[[], Any]

    @property
    def missing(self) -> tuple[Picture, ...]:
        """The different ones that are not kept, in the order in which they stand first."""
        lacking = (picture for picture, length in zip(self.pictures, self.lengths, strict=True) if length is None)
        return tuple(dict.fromkeys(lacking))


def known_pictures(keys: Sequence[Sequence[int]], store: KeptFeatures, all_pixels: Callable[[], Any]) -> KnownPictures:
    """Return what is known of spans with these keys, of each document. all_pixels: of these."""
    pictures = pictures_of(keys)
    found = [store.find(picture) for picture in pictures]
    kept = [features for features in found if features is not None]
    lengths = tuple(None if features is None else len(features) for features in found)
    return KnownPictures(pictures, lengths, torch.cat(kept) if kept else None, store, all_pixels)
