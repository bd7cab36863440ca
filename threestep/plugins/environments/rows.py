"""The rows that open environments: those of the data flags as step 3 would hand them over, or one of `--row`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import json_object

if TYPE_CHECKING:
    from training.utils.data.arguments import DataArguments

Row = dict[str, Any]


def rows_of(given: str | None, data: DataArguments, most: int, seed: int) -> list[Row]:
    """Return rows with `messages`, `prompt`, `ground_truth` and their columns, one or more.

    given: the value of --row; None: the first `most` rows of the data, or an empty one without data.
    """
    if given is not None:
        return [whole_row(json_object(given or "{}", "--row"))]
    if not data.source.data_path:
        return [whole_row({})]
    rows = list(islice(_rows_of_data(data, seed), most))
    if not rows:
        raise ThreestepError("--data_path has no row with a prompt, which an environment needs to open; use other rows")
    return rows


def whole_row(columns: Mapping[str, Any]) -> Row:
    """The row with the three columns that every row has in step 3."""
    prompt = str(columns.get("prompt", ""))
    fixed = {"messages": [{"role": "user", "content": prompt}], "prompt": prompt, "ground_truth": None}
    return {**fixed, **columns}


def _rows_of_data(data: DataArguments, seed: int) -> Any:
    from training.utils.data.build.portions import open_sources
    from training.utils.data.formats.messages import messages_of_text
    from training.utils.data.kinds.samples import read_carried

    for source in open_sources(3, data, seed):
        for place, sample in enumerate(source.raw.get_train_data()):
            where = f"dataset '{source.name}', row {place}"
            messages, prompt = source.raw.get_prompt_messages(sample), source.raw.get_prompt(sample)
            if messages is None and prompt is None:
                continue
            reference, columns = read_carried(source.raw, sample, source.name, where)
            if messages is None:
                messages = messages_of_text(prompt or "")
            text = "\n".join(str(message["content"]) for message in messages) if prompt is None else prompt
            yield {**columns, "messages": list(messages), "prompt": text, "ground_truth": reference}
