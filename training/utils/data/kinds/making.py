"""The means by which samples of one source become rows of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.utils.data.cache.reports import Counts
    from training.utils.data.chat.chat import TextPiece
    from training.utils.data.kinds.parallel_thinking import ParallelCheck
    from training.utils.data.kinds.strategies import ReadSample
    from training.utils.data.rows.arguments import RowArguments
    from training.utils.data.rows.tokenize import Ids, TextTokenizer
    from training.utils.images.data.row_pictures import RowPictures
    from training.utils.images.spans import ImageSpan


@dataclass(frozen=True)
class Waiting:
    """A sample that waits for the tokenizer. carried: of `RowKind.carried`."""

    row_id: int
    sample: ReadSample
    carried: dict[str, Any]


@dataclass(frozen=True)
class Making:
    """images: reads those of the rows; None where the model reads text alone."""

    source_name: str
    flags: RowArguments
    texts: TextTokenizer
    counts: Counts
    parallel: ParallelCheck
    images: RowPictures | None

    def spans(self, one: Waiting, ids: Ids, others: Sequence[Ids] = ()) -> tuple[ImageSpan, ...]:
        """Spans of a row's images in its tokens `ids`; none may stand in `others`."""
        if self.images is None:
            return ()
        for each in others:
            self.images.spans(each, (), one.sample.where)
        return self.images.spans(ids, one.sample.images, one.sample.where)

    def count_ends(self, learnt: Iterable[tuple[TextPiece, Ids]]) -> None:
        """Count the special tokens that carry loss: those at the end of a response, and those before it."""
        special = self.texts.special
        for piece, ids in learnt:
            last = ids[-1] if piece.is_end and ids else None
            before = ids if last is None else ids[:-1]
            self.counts.inside.update(special[token] for token in before if token in special)
            if last in special:
                self.counts.ends[special[last]] += 1
