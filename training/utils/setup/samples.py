"""Samples of an evaluation: which held-out rows, and where they are written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.contracts.evaluations import EvaluationObserver
from training.utils.contracts.media_names import MEDIA_COLUMN
from training.utils.layout.order import ShuffledStream

if TYPE_CHECKING:
    from training.utils.contracts.media import MediaKeeper
    from training.utils.run.metrics import MetricsWriter
    from training.utils.run.run_folder import RunFolder


class SampleMedia(NamedTuple):
    """The names of a sample's media."""

    names: list[str]

    @property
    def columns(self) -> dict[str, list[str]]:
        """Their column of a sample; none without any."""
        return {MEDIA_COLUMN: self.names} if self.names else {}


@dataclass(frozen=True)
class EvaluationSamples:
    """count: rows of each evaluation; 0 writes nothing. decode: token ids -> text. end_token_ids: a text leaves out one
    that ends it. keeper: keeps the media of rows; None where no row has any. observer: sees them."""

    count: int = 0
    folder: RunFolder | None = None
    decode: Callable[[Sequence[int]], str] = str
    end_token_ids: frozenset[int] = frozenset()
    keeper: MediaKeeper | None = None
    observer: EvaluationObserver = EvaluationObserver()

    def rows(self, total: int, seed: int) -> list[int]:
        """Indices of the rows, drawn by the seed: the same in every evaluation and on any number of ranks."""
        return sorted(ShuffledStream(total, seed).take(0, min(self.count, total))) if self.count and total else []

    def text(self, ids: Sequence[int]) -> str:
        """Without the token that ends it."""
        return str(self.decode(ids[:-1] if ids and ids[-1] in self.end_token_ids else ids))

    def media(self, media: Sequence[Any]) -> SampleMedia:
        """The media of a row, copies of which are kept beside samples.jsonl."""
        return SampleMedia([] if self.keeper is None else self.keeper.names(media))

    def write(self, metrics: MetricsWriter, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Append them to samples.jsonl; trackers get the first `count`."""
        if self.folder is None or not samples:
            return
        lines = [{"step": step, **sample} for sample in samples]
        self.folder.append_samples(lines)
        metrics.write_samples(step, lines)
        self.observer.samples(step, lines)


def sample_uid(*texts: str) -> str:
    """16 hex digits of the texts: the same in every run, whatever the order of the data."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
