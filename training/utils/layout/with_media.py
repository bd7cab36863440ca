"""Rows whose documents may hold more than text: laid out, and given what a run's media have for them.

A run has one `RunMedia`, or None where its rows are text alone; a step hands it on as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from training.utils.layout.rows import packed_rows

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.layout.planner import MicroBatch


def lacks_media(step: Sequence[Sequence[MicroBatch]], rank: int, held: Sequence[bool]) -> list[bool]:
    """Return for each of a rank's micro-batches whether it has no media where that of another rank has some.

    Under ZeRO-3 the ranks gather a module's weights together, and below it they add up its gradients together: what
    reads media must run on all ranks or on none.

    step: of `plan_step`. held: for each document of the step, whether it holds media.
    """
    found = [[any(held[index] for row in rows for index in row) for rows in mine] for mine in step]
    return [any(column) and not column[rank] for column in zip(*found, strict=True)]


def laid_out(
    documents: Sequence[Sequence[Document]],
    pad_token_id: int,
    media: RunMedia | None,
    lacks: bool = False,
    *,
    with_before: bool = False,
) -> TokenRows:
    """Return `packed_rows` with what a model reads of their media.

    lacks: of `lacks_media`. The document that is then added is no sequence, and nothing sees it; it stands at the end
        of the last row where rows hold several documents, and else in a row of its own.
    """
    if media is None:
        return packed_rows(documents, pad_token_id, with_before=with_before)
    rows = [list(row) for row in documents]
    if lacks and any(len(row) > 1 for row in rows):
        rows[-1].append(media.alone)
    elif lacks:
        rows.append([media.alone])
    made = packed_rows(rows, pad_token_id, with_before=with_before)
    return media.loaded(replace(made, end_B=made.end_B[:-1]) if lacks else made)
