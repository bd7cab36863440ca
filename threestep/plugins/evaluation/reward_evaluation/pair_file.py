"""A file of pairs to be scored: its rows as tokens, and a line for each when the scores are there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import ResponsesRow
from training.utils.data.chat.chat import ChatTokenizer
from training.utils.data.chat.style import text_maker
from training.utils.data.file_dataset import create_raw_dataset
from training.utils.data.kinds.kind import ChatText
from training.utils.data.kinds.table import KINDS
from training.utils.data.rows.tokenize import Dropped, Ids, TextTokenizer, TooLong, fit_sentences
from training.utils.setup.media import held_media

if TYPE_CHECKING:
    from training.utils.contracts.media import MediaReader, SeenMedia
    from training.utils.data.arguments import DataArguments
    from training.utils.data.raw_dataset import PromptRawDataset
    from training.utils.preference.evaluation import ScoredResponses

_COLUMNS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class PairFile:
    """rows: the pairs to score; row_id: the place in the file, from 1. left_out: by place, why a pair is not scored.
    seen: the media of the rows; None if the model reads text alone.
    """

    rows: list[ResponsesRow]
    left_out: dict[int, str]
    seen: SeenMedia | None = None


class _Encoded(NamedTuple):
    """The ids of a prompt, of a chosen and a rejected response, and where media stand in the prompt."""

    prompt: Ids
    responses: Sequence[Ids]
    media: tuple[Any, ...] = ()


def read_pairs(path: str, data: DataArguments, tokenizer: Any, reader: MediaReader | None = None) -> PairFile:
    """Read and tokenize a JSON-lines file, by the columns, lengths and truncation of `data`; no row is shuffled.

    reader: of media; None where the model reads text alone. Raises ThreestepError if the file has no rows, or a row
    lacks a text (for a model that reads media it is left out).
    """
    raw = create_raw_dataset(f"jsonl:{path}", data.source, data.cache.cache_dir, seed=0)
    texts = text_maker(data.chat, tokenizer)
    media = None if reader is None else held_media(reader, data.forms)
    encoded: Iterator[_Encoded | Dropped]
    if isinstance(texts, ChatTokenizer):
        raw.expect_media(reader is not None)
        if reader is None:
            _texts(path, raw)
        strategy = ChatText(texts, raw, media)
        encoded, texts = _under_template(path, raw, strategy, media), texts.texts
    else:
        encoded = _as_stored(_texts(path, raw), texts)
    rows, left_out, most = [], {}, data.rows.max_seq_len
    for place, pair in enumerate(encoded, start=1):
        try:
            if isinstance(pair, Dropped):
                raise pair
            if not pair.prompt:
                raise Dropped("empty_prompt")
            kept, responses, _ = fit_sentences(
                len(pair.prompt), pair.responses, most, data.rows.truncation, end_id=texts.end_id
            )
            prompt = np.array([pair.prompt[place] for place in kept], np.int32)
            as_arrays = tuple(np.array(ids, np.int32) for ids in responses)
            spans = () if media is None else media.after_cut(pair.media, kept)
            rows.append(ResponsesRow(place, prompt, as_arrays, media=spans))
        except Dropped as reason:
            left_out[place] = str(reason)
        except TooLong as long:
            raise ThreestepError(
                f"{path}, pair {place}: a text has {long.length_tokens} tokens, more than --max_seq_len {most}, and "
                "--truncation error is set; raise --max_seq_len or change --truncation"
            ) from None
    return PairFile(rows, left_out, None if media is None else media.seen)


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


def _as_stored(columns: tuple[list[str], ...], texts: TextTokenizer) -> Iterator[_Encoded]:
    for encoded in texts.encode_sentences(columns[0], list(zip(*columns[1:], strict=True))):
        prompt, *pair = encoded.parts
        yield _Encoded(prompt, pair)


def _under_template(path: str, raw: PromptRawDataset, strategy: ChatText, media: Any) -> Iterator[_Encoded | Dropped]:
    """Ids of each pair by the chat template, or the reason why it has none. Raises BadConversation."""
    samples: Sequence[Any] = raw.get_train_data()
    for place, sample in enumerate(samples, start=1):
        try:
            read = KINDS["ranked"].read_chat(strategy, _COLUMNS[1:], sample, f"{path}, pair {place}")
        except Dropped as reason:
            yield reason
            continue
        [encoded] = strategy.encode([read])
        prompt = [token for piece in encoded.parts[: read.prompts] for token in piece]
        responses = encoded.parts[read.prompts :]
        spans: tuple[Any, ...] = ()
        if media is not None:
            spans = media.spans(prompt, read.media, read.where)
            for response in responses:
                media.spans(response, (), read.where)
        yield _Encoded(prompt, responses, spans)


def _texts(path: str, raw: PromptRawDataset) -> tuple[list[str], ...]:
    """The prompts, the chosen and the rejected responses of the file."""
    samples: Sequence[Any] = raw.get_train_data()
    columns: tuple[list[str], ...] = ([], [], [])
    for place, sample in enumerate(samples, start=1):
        found = (raw.get_prompt(sample), raw.get_chosen(sample), raw.get_rejected(sample))
        for name, column, text in zip(_COLUMNS, columns, found, strict=True):
            if text is None:
                raise ThreestepError(
                    f"{path}, pair {place}: expected strings in prompt, chosen and rejected, but {name} is missing; "
                    f"name its column with --{name}_column"
                )
            column.append(text)
    return columns
