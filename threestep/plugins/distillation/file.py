"""A file of a teacher's likeliest tokens, `--distill FILE.jsonl` or `.parquet`: one row a sequence.

    input_ids       [T] the sequence's tokens, as the student's run makes them
    places          [n] of the tokens in it that are predicted, ascending, from 1 on
    top_ids         [n][k] the teacher's likeliest tokens at each of these places
    top_logprobs    [n][k] their log-probabilities, at temperature 1
    rest_logprobs   [n] that of all other tokens together; may be left out (then of 1 minus the sum)

The whole file is held in memory: 12 bytes a place and 8 a token of k.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.distillation.settings import FILE_FLAG
from threestep.plugins.distillation.top_tokens import TopTable, keys_of, rest_of
from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.storage import parse_json

if TYPE_CHECKING:
    from training.utils.contracts.rows import SentenceRow

_COLUMNS = ("input_ids", "places", "top_ids", "top_logprobs")
_REST = "rest_logprobs"


def read_table(path: Path) -> TopTable:
    """Return the content of a file; ThreestepError, with the row, for what is not as above."""
    keys: list[int] = []
    ids: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    rests: list[np.ndarray] = []
    for where, row in _rows_of(path):
        places, ids_nk, logprobs_nk, rest_n = _checked(where, row, ids[0].shape[1] if ids else None)
        of_row = keys_of(row["input_ids"])
        keys += [of_row[place - 1] for place in places]
        ids.append(ids_nk)
        logprobs.append(logprobs_nk)
        rests.append(rest_n)
    if not keys:
        raise ThreestepError(f"{FILE_FLAG}: {path} has no rows; write it again")
    return TopTable(keys, *map(np.concatenate, (ids, logprobs, rests)))


def _rows_of(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(path)
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(table.to_pylist()))
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number}", parse_json(line)
    except (OSError, ValueError) as problem:  # pyarrow's are of both
        raise ThreestepError(
            f"{FILE_FLAG} expects JSON lines or Parquet (.parquet), but {path} cannot be read: {first_line(problem)}"
        ) from problem


def _checked(where: str, row: Any, top: int | None) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """The places of a row, and what the teacher says of them. top: k of the rows before."""
    if not isinstance(row, Mapping) or any(not isinstance(row.get(name), list) for name in _COLUMNS):
        raise ThreestepError(
            f"{FILE_FLAG}: {where}: expected lists {', '.join(_COLUMNS)}; threestep/plugins/distillation/README.md "
            "describes the format"
        )
    places = row["places"]
    if any(type(each) is not int or not 0 <= each < 2**31 for name in ("input_ids", "places") for each in row[name]):
        raise ThreestepError(f"{FILE_FLAG}: {where}: expected whole numbers in input_ids and places")
    try:
        ids_nk, logprobs_nk = np.array(row["top_ids"], np.int32), np.array(row["top_logprobs"], np.float32)
        rest_n = np.array(row[_REST], np.float32) if row.get(_REST) is not None else rest_of(logprobs_nk)
    except (ValueError, TypeError, OverflowError) as problem:
        raise ThreestepError(
            f"{FILE_FLAG}: {where}: expected the same number of values at each place ({problem})"
        ) from problem
    shape = (len(places), ids_nk.shape[1] if ids_nk.ndim == 2 else 0)
    mistakes = {
        "ascending places within input_ids, from 1": sorted(set(places)) == places
        and all(isinstance(place, int) and 0 < place < len(row["input_ids"]) for place in places),
        f"lists of {top or 'equally many'} tokens at each place": ids_nk.shape == logprobs_nk.shape == shape
        and shape[1] > 0
        and top in (None, shape[1]),
        "one number in rest_logprobs for each place": rest_n.shape == shape[:1],
        "log-probabilities of at most 0, without NaN": bool((logprobs_nk <= 1e-4).all() and (rest_n <= 1e-4).all()),
        "no repeated token at a place": all(len(set(each)) == len(each) for each in ids_nk.tolist()),
    }
    for expected, holds in mistakes.items():
        if not holds:
            raise ThreestepError(f"{FILE_FLAG}: {where}: expected {expected}; write the file again")
    return places, ids_nk, logprobs_nk, rest_n


def write_table(path: Path, rows: Sequence[SentenceRow], table: TopTable) -> None:
    """Write what the table has of rows, beside the path and then in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([_row(row, table) for row in rows]), beside)
    else:
        with beside.open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(_row(row, table)) + "\n" for row in rows)
    beside.replace(path)


def _row(row: SentenceRow, table: TopTable) -> dict[str, Any]:
    ids = row.input_ids.tolist()
    top = table.of(keys_of_row(row))
    return {
        "input_ids": ids,
        "places": np.flatnonzero(row.loss_mask).tolist(),
        "top_ids": top.ids_Uk.tolist(),
        "top_logprobs": top.logprobs_Uk.tolist(),
        _REST: top.rest_U.tolist(),
    }


def keys_of_row(row: SentenceRow) -> list[int]:
    """Return the key of the beginning before each token that is predicted."""
    keys = keys_of(row.input_ids.tolist())
    return [keys[place - 1] for place in np.flatnonzero(row.loss_mask).tolist()]
