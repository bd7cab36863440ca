"""One small file of a form of data, through all three phases, as lines of text that show where the loss falls.

Rows are made by the code of the build, without its cache, so that a hundred forms take seconds. Of each row that is
kept there is a line, in which $ stands for the token that ends a response:

    phase 1: what is learnt stands in « »             Human: Hi Assistant:« Ho$»
    phase 2: the prompt, then its responses, best first       Human: Hi Assistant:| Ho$| No$
    phase 3: the prompt                               Human: Hi Assistant:

and of the rows that are left out one line each, "- no_rejected". A refusal is one line, "! " and its sentence.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.support.data_flags import data_flags
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.build.portions import DataSource
from training.utils.data.build.row_maker import RowMaker
from training.utils.data.cache.shards import Counts
from training.utils.data.chat.style import text_maker
from training.utils.data.file_dataset import create_raw_dataset
from training.utils.data.kinds.table import kind_of
from training.utils.flags.flags import note_mistakes

# A message is <role>content, the assistant's ends with the end token; contents must be text, as for most models.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<tool>' + tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + (message['content'] or '') }}"
    "{% for call in message.get('tool_calls', []) %}"
    "{{ '[' + call.function.name + ' ' + call.function.arguments | tojson + ']' }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = "<|endoftext|>"


def write_jsonl(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def lines_of(phase: int, name: str, tokenizer: Any, cache_dir: str, **given: Any) -> list[str]:
    """What a phase gets of the `--data_path` entry `name`, as above; `given`: further data flags."""
    settings = {"max_seq_len": 512, "max_prompt_seq_len": 512, "eval_fraction": 0.0, "data_output_path": cache_dir}
    data = data_flags(**{"data_path": [name], **settings, **given})
    counts = Counts()
    try:
        mistakes = Mistakes()
        note_mistakes(data, mistakes)
        mistakes.raise_if_any()
        raw = create_raw_dataset(name, data.source, cache_dir, 1)
        rows = raw.get_train_data()
        raw.check_phase(phase)
        texts = text_maker(data.chat, tokenizer)
        maker = RowMaker(kind_of(phase), data, texts, DataSource(name, raw, "1,1,1"), counts=counts)
        made = list(maker.rows(rows, range(len(rows)), 0))
    except ThreestepError as refused:
        return [f"! {refused}"]
    shown = [_line(phase, row, tokenizer) for row in made]
    return [*shown, *(f"- {reason}" for reason in sorted(counts.dropped.elements()))]


def _line(phase: int, row: Any, tokenizer: Any) -> str:
    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False).replace(END, "$")

    if phase == 1:
        ids, runs, at = row.input_ids.tolist(), [], 0
        for carries_loss, group in groupby(row.loss_mask.tolist()):
            end = at + len([*group])
            text = _going_on(ids[:at], ids[at:end], decode)
            runs.append(f"«{text}»" if carries_loss else text)
            at = end
        return "".join(runs)
    if phase == 2:
        prompt = row.prompt_ids.tolist()
        return "|".join([decode(prompt), *(_going_on(prompt, ids.tolist(), decode) for ids in row.response_ids)])
    return decode(row.flipped_prompt_ids[::-1].tolist())


def _going_on(before: Sequence[int], ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Return the text that `ids` add after `before`. Decoded alone, they may lose the space that they begin with."""
    start, whole = decode(before), decode([*before, *ids])
    return whole[len(start) :] if whole.startswith(start) else decode(ids)
