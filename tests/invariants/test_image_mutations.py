"""1,000 rows with images, damaged in their columns, their messages and the bytes of their pictures (20,000 in the long
form): each is read, or dropped, or ends in one ThreestepError; what is read has the tokens and pixels of its images."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.invariants.mutations import HI, HO, WRITERS, damage_bytes, damage_rows, watchdog
from tests.support.data_flags import data_flags
from tests.support.image_readers import FAMILIES, picture, reader_of, tokenizer_of
from threestep.plugins.images.data.reader import PixelReader
from threestep.plugins.images.data.row_pictures import RowPictures
from threestep.plugins.inspect.views import document_of
from training.utils.base.errors import ThreestepError
from training.utils.data.build.portions import DataSource
from training.utils.data.build.row_maker import RowMaker
from training.utils.data.cache.shards import Counts
from training.utils.data.chat.style import text_maker
from training.utils.data.file_dataset import create_raw_dataset
from training.utils.data.kinds.table import kind_of
from training.utils.data.rows.media_store import HeldMedia
from training.utils.layout.rows import packed_rows

PART, TEXT = {"type": "image"}, {"type": "text", "text": "What?"}
ASK = {"role": "user", "content": "<image>What?"}
JUNK_IMAGES: list[Any] = [
    None, "", "a.png", "./b.jpg", "../a.png", "/etc/passwd", "https://a.org/b.png", "data:image/png;base64,AAAA", 5, {},
    {"bytes": "AAAA"}, {"path": "a.png"}, {"path": ["a.png"]}, {"url": "a.png"}, [], ["a.png"], "a.png" * 99, "\u0000",
    True,
]  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"messages": [ASK, HO], "images": ["a.png"]},
    {"messages": [{**ASK, "content": "<image><image>?"}, HO, HI, HO], "images": ["a.png", "b.jpg"]},
    {"prompt": [{"role": "user", "content": [PART, TEXT]}], "chosen": [HO], "rejected": [{**HO, "content": "No"}],
     "images": ["b.jpg"]},
    {"prompt": "What?", "completion": "A thing", "image": "a.png"},
    {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "Yes"}], "image": "b.jpg"},
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, TEXT]}, HO]},
    {"messages": [HI, HO], "images": []},
]  # fmt: skip
PHASE_FLAGS = {"max_seq_len": 90, "max_prompt_seq_len": 60}


@pytest.fixture(scope="module")
def families():
    made = []
    for family in FAMILIES:
        tokenizer = tokenizer_of(family)
        flags = data_flags(prompt_style="chat_template", **PHASE_FLAGS)
        made.append((reader_of(family, tokenizer), text_maker(flags.chat, tokenizer)))
    return made


def damaged_row(dice: random.Random, form: dict[str, Any]) -> dict[str, Any]:
    row = dict(form)
    for column in ("images", "image"):
        if column in row and dice.random() < 0.4:
            many = row[column] if isinstance(row[column], list) else [row[column]]
            changed = [dice.choice(JUNK_IMAGES) if dice.random() < 0.5 else one for one in many]
            row[column] = changed if dice.random() < 0.8 else dice.choice(JUNK_IMAGES)
    return row


def write_pictures(dice: random.Random) -> None:
    """Two pictures beside the rows, of odd sizes, forms and damages."""
    sides = [dice.choice((1, 2, 13, 28, 60, 150, 301)) for _ in range(4)]
    for name, (width, height), form in (("a.png", sides[:2], "PNG"), ("b.jpg", sides[2:], "JPEG")):
        data = picture(width, height, form=dice.choice((form, form, "GIF", "BMP", "TIFF")))
        for _ in range(dice.choice((0, 0, 1, 2))):
            data = damage_bytes(dice, data)
        Path(name).write_bytes(data)


def read_rows(number: int, families: list[Any], rows_a_file: int = 4) -> list[str]:
    """How each row of one damaged file ended."""
    dice = random.Random(f"images {number}")
    reader, texts = dice.choice(families)
    phase, held, counts = dice.choice((1, 2, 3)), HeldMedia(), Counts()
    form = dice.choice(FORMS)
    rows: list[Any] = [damaged_row(dice, form) for _ in range(rows_a_file)]
    for _ in range(dice.choice((0, 0, 1))):
        damage_rows(dice, rows)
    write_pictures(dice)
    kind = dice.choice(("jsonl", "jsonl", "parquet"))
    content = WRITERS[kind](rows)
    kind, content = ("jsonl", WRITERS["jsonl"](rows)) if content is None else (kind, content)
    Path(f"rows.{kind}").write_bytes(content)
    how = {"truncation": dice.choice(("right", "drop", "left", "middle")), "loss_on": "response"}
    flags = data_flags(prompt_style="chat_template", data_path=[f"{kind}:rows.{kind}"], **PHASE_FLAGS, **how)
    try:
        raw = create_raw_dataset(flags.source.data_path[0], flags.source, "cache", 1)
        raw.reads_images = True
        offered = raw.get_train_data()
        raw.check_phase(phase)
    except ThreestepError as mistake:
        assert str(mistake).strip()
        return ["mistake"] * rows_a_file
    source = DataSource("rows", raw, "1,1,1")
    maker = RowMaker(kind_of(phase), flags, texts, source, counts=counts, media=RowPictures(reader, held))
    ended = []
    for index in range(len(offered)):
        before = sum(counts.dropped.values())
        try:
            made = list(maker.rows(offered, [index], 0))
        except ThreestepError as mistake:
            assert str(mistake).strip() and "\n" not in str(mistake)
            ended.append("mistake")
            continue
        assert len(made) + sum(counts.dropped.values()) - before == 1
        ended.append("images" if made and made[0].media else "result")
        for row in made:
            check(row, reader, held)
    return ended


def check(row: Any, reader: Any, held: HeldMedia) -> None:
    """The row lays out, and its images have pixels; Qwen's as many patches as its tokens need."""
    rows = packed_rows([[document_of(row)]], 0)
    assert (rows.input_ids_NT == reader.family.placeholder_id).sum() == sum(image.tokens for image in row.media)
    if row.media:
        pixels = PixelReader(reader, held)([image.key for image in rows.media.spans])
        assert len(pixels.counts) == len(row.media) and sum(pixels.counts) == len(pixels.values)
        if pixels.grids_I3 is not None:
            assert (pixels.grids_I3.prod(1) // 4).tolist() == [image.tokens for image in row.media]


@pytest.mark.parametrize("count", [250, pytest.param(5000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_damaged_rows_with_images_are_read_or_end_in_a_sentence(count, families, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended: list[str] = []
    for number in range(count):
        try:
            with watchdog(20.0):
                ended += read_rows(number, families)
        except Exception as problem:
            raise AssertionError(f"case {number}") from problem
    assert len(ended) >= 4 * count * 0.95
    assert ended.count("images") > len(ended) // 8 and ended.count("mistake") > len(ended) // 4, ended
