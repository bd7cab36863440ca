"""The choice of held-out rows that are shown, and their texts and media."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.contracts.rows import MEDIA_COLUMN
from training.utils.layout.order import ShuffledStream

if TYPE_CHECKING:
    from training.utils.contracts.media import Keep


class SampleMedia(NamedTuple):
    """The names of a sample's media."""

    names: list[str]

    @property
    def columns(self) -> dict[str, list[str]]:
        """Their column of a sample; none without any."""
        return {MEDIA_COLUMN: self.names} if self.names else {}


@dataclass(frozen=True)
class SampleTexts:
    """decode: token ids -> text. end_token_ids: a text leaves out one that ends it. keeper: keeps the media of rows;
    None where no row has any."""

    decode: Callable[[Sequence[int]], str] = str
    end_token_ids: frozenset[int] = frozenset()
    keeper: Keep | None = None

    def text(self, ids: Sequence[int]) -> str:
        """Without the token that ends it."""
        return str(self.decode(ids[:-1] if ids and ids[-1] in self.end_token_ids else ids))

    def media(self, media: Sequence[Any]) -> SampleMedia:
        """The media of a row, copies of which are kept beside samples.jsonl."""
        return SampleMedia([] if self.keeper is None else self.keeper(media))


def sampled_rows(count: int, total: int, seed: int) -> list[int]:
    """Return indices of `count` of `total` rows, drawn by the seed: the same in every evaluation and on any number of
    ranks."""
    return sorted(ShuffledStream(total, seed).take(0, min(count, total))) if count and total else []


def sample_uid(*texts: str) -> str:
    """16 hex digits of the texts: the same in every run, whatever the order of the data."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
