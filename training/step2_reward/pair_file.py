"""A file of pairs to be scored: its rows as tokens, and a line for each when the scores are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training.utils.data.build.arguments import DataArguments
from training.utils.data.rows.phases import ResponsesRow
from training.utils.data.rows.tokenize import Dropped, TextTokenizer, TooLong, fit_sentences
from training.utils.data.sources.create import create_raw_dataset
from training.utils.preference.evaluation import ScoredResponses
from training.utils.run.console import log
from training.utils.run.errors import ThreestepError

_COLUMNS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class PairFile:
    """rows: the pairs to score; row_id: the place in the file, from 1. left_out: by place, why a pair is not scored."""

    rows: list[ResponsesRow]
    left_out: dict[int, str]


def read_pairs(path: str, data: DataArguments, tokenizer: Any) -> PairFile:
    """Read and tokenize a JSON-lines file, by the columns, lengths and truncation of `data`; no row is shuffled.

    Raises ThreestepError if a row lacks a text or the file has no rows.
    """
    columns = _texts(path, data)
    texts = TextTokenizer(tokenizer, data.chat.end_of_conversation_token)
    prompt_ids = texts.encode_prompts(columns[0])
    chosen_ids, rejected_ids = (texts.encode_responses(columns[0], prompt_ids, responses) for responses in columns[1:])
    rows, left_out, most = [], {}, data.rows.max_seq_len
    for place, (prompt, *responses) in enumerate(zip(prompt_ids, chosen_ids, rejected_ids, strict=True), start=1):
        try:
            if not prompt:
                raise Dropped("empty_prompt")
            prompt, responses, _ = fit_sentences(prompt, responses, most, data.rows.truncation, texts.end_id)
            as_arrays = tuple(np.array(ids, np.int32) for ids in responses)
            rows.append(ResponsesRow(place, np.array(prompt, np.int32), as_arrays))
        except Dropped as reason:
            left_out[place] = str(reason)
        except TooLong as long:
            raise ThreestepError(
                f"{path}, pair {place}: a sentence of {long.length_tokens} tokens, and --max_seq_len is {most} with "
                "--truncation error; raise the one or change the other"
            ) from None
    return PairFile(rows, left_out)


def write_scores(pairs: PairFile, scored: ScoredResponses, output: str | None, is_main_rank: bool) -> None:
    """Print a line for each pair, in the order of the file; write them to `output` as JSON lines too."""
    if not is_main_rank:
        return
    found: dict[int, dict[str, Any]] = {place: {"left_out": reason} for place, reason in pairs.left_out.items()}
    for row, (chosen, rejected) in zip(pairs.rows, scored.score_R.reshape(-1, 2).tolist(), strict=True):
        gap = chosen - rejected
        winner = "chosen" if gap > 0 else "rejected" if gap < 0 else "tie"
        found[row.row_id] = {"chosen": chosen, "rejected": rejected, "gap": gap, "winner": winner}
    lines = [{"pair": place, **found[place]} for place in sorted(found)]
    for line in lines:
        log(_sentence(line))
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _sentence(line: dict[str, Any]) -> str:
    if "left_out" in line:
        return f"pair {line['pair']}: left out, {line['left_out']}"
    wins = "a tie" if line["winner"] == "tie" else f"{line['winner']} wins"
    scores = f"chosen {line['chosen']:.4f}, rejected {line['rejected']:.4f}, gap {line['gap']:+.4f}"
    return f"pair {line['pair']}: {scores}: {wins}"


def _texts(path: str, data: DataArguments) -> tuple[list[str], ...]:
    """The prompts, the chosen and the rejected responses of the file."""
    raw = create_raw_dataset(f"jsonl:{path}", data.source, data.cache.cache_dir, seed=0)
    samples: Sequence[Any] = raw.get_train_data()
    columns: tuple[list[str], ...] = ([], [], [])
    for place, sample in enumerate(samples, start=1):
        found = (raw.get_prompt(sample), raw.get_chosen(sample), raw.get_rejected(sample))
        for name, column, text in zip(_COLUMNS, columns, found, strict=True):
            if text is None:
                raise ThreestepError(
                    f"{path}, pair {place}: expected the texts prompt, chosen and rejected, got no {name}; "
                    f"name its column with --{name}_column"
                )
            column.append(text)
    if not columns[0]:
        raise ThreestepError(f"{path}: expected pairs to score, got an empty file")
    return columns
