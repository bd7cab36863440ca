"""Running out of memory ends in an error that names the lengths of the rows and the flags that help."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.memory import is_out_of_memory, out_of_memory_sentence
from training.utils.contracts.token_rows import PAD_SEGMENT, TokenRows

_SHOWN_ROWS = 16


@contextlib.contextmanager
def memory_explained(doing: str, rank: int, shape: Callable[[], str]) -> Iterator[None]:
    """Inside, an allocator's out-of-memory error becomes a ThreestepError, as does what --deterministic refuses.

    shape: describes the input
    """
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        if "deterministic implementation" in str(problem):  # torch's words, with --deterministic on CUDA
            raise ThreestepError(
                f"--deterministic: {doing} of {shape()} needs an operation that CUDA has in no deterministic form "
                f"({first_line(problem)}); leave the flag out"
            ) from problem
        if not is_out_of_memory(problem):
            raise
        raise ThreestepError(out_of_memory_sentence(problem, f" on rank {rank} in {doing} of {shape()}")) from problem


def rows_in_words(rows: object) -> str:
    """Describe a TokenRows: its rows, their width, and the tokens of each that are not padding."""
    if not isinstance(rows, TokenRows):
        return "a micro-batch"
    count, width = rows.input_ids_NT.shape
    lengths = (rows.segment_ids_NT != PAD_SEGMENT).sum(dim=1).tolist()
    shown = ", ".join(str(length) for length in lengths[:_SHOWN_ROWS]) + (", ..." if count > _SHOWN_ROWS else "")
    return (
        f"{count} row{'s' if count != 1 else ''} of {width} tokens ({rows.end_B.numel()} sequences; tokens per row "
        f"without padding: {shown})"
    )
