"""The shapes: every answer is read from the pixels again, the checker takes it alone, and nothing depends on the
machine."""

from __future__ import annotations

import hashlib
import re

import pytest

from tests.support.data_flags import raw_dataset_of
from tests.unit.utils.data.test_fingerprint_row_versions import digest, texts_of
from threestep.plugins.images.data.shapes import (
    BACKGROUND,
    CELL_PIXELS,
    COLOURS,
    FORMS,
    HELD_OUT_ROWS,
    ROWS_VERSION,
    TRAINING_ROWS,
    ShapesDataset,
    generate,
    picture_of,
)
from training.utils.data.arguments import DataArguments
from training.utils.rewards.rules import exact_match_reward

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def rows():
    return generate(7, training_rows=600, held_out_rows=60)


def seen(picture):
    """Rows of shapes of a picture by its pixels alone: of a cell's 20 x 20 pixels a square fills all, a circle pi/4 of
    them and a triangle half."""
    size = CELL_PIXELS
    return [
        [shape_in(picture.crop((left, top, left + size, top + size))) for left in range(0, picture.width, size)]
        for top in range(0, picture.height, size)
    ]


def shape_in(cell):
    colours = {pixel: count for count, pixel in cell.getcolors()}
    assert colours.pop(BACKGROUND) >= CELL_PIXELS**2 - 400
    if not colours:
        return "nothing"
    ((pixel, filled),) = colours.items()
    shares = {"square": 1.0, "circle": 0.785, "triangle": 0.5}
    form = min(shares, key=lambda name: abs(shares[name] - filled / 400))
    return f"{next(name for name, rgb in COLOURS.items() if rgb == pixel)} {form}"


def answered(question, pictures):
    """The right answer, worked anew from the pixels."""
    of_each = [seen(picture) for picture in pictures]
    counts = [sum(shape != "nothing" for row in rows for shape in row) for rows in of_each]
    if question == "How many shapes?":
        return str(counts[0])
    if found := re.fullmatch(r"What is in the (middle|(north|south)?(west|east)?)\?", question):
        row = -1 if found[2] == "south" else 0
        column = -1 if found[3] == "east" else 0
        assert (len(of_each[0]), len(of_each[0][0])) == (1 + bool(found[2]), 1 + bool(found[3]))
        return of_each[0][row][column]
    assert question == "Which picture has more shapes?"
    first, second = counts
    return "neither" if first == second else "first" if first > second else "second"


def test_the_answer_is_what_the_pixels_say(rows):
    for row in rows["train"]:
        assert answered(row.question, [picture_of(grid) for grid in row.grids]) == row.answer


def test_the_checker_takes_the_answer_and_no_other(rows):
    every = rows["train"] + rows["eval"]
    answers, wrong = [row.answer for row in every], [row.wrong for row in every]
    nothing = [""] * len(every)
    assert set(exact_match_reward(nothing, answers, answers)) == {1.0}
    assert set(exact_match_reward(nothing, wrong, answers)) == {0.0}
    assert set(exact_match_reward(nothing, [f"{answer} circle" for answer in answers], answers)) == {0.0}
    for row in every:  # a wrong answer has the form of a right one
        forms = (r"\d", r"nothing|(red|green|blue) (circle|square|triangle)", r"first|second|neither")
        assert any(re.fullmatch(form, row.answer) and re.fullmatch(form, row.wrong) for form in forms)


def test_each_kind_and_answer_comes_and_held_out_rows_are_in_no_training_set(rows):
    kinds = {kind: [row for row in rows["train"] if row.kind == kind] for kind in ("count", "name", "compare")}
    assert all(len(own) > len(rows["train"]) / 6 for own in kinds.values())
    assert {len(row.grids) for row in kinds["compare"]} == {2} and {len(row.grids) for row in kinds["count"]} == {1}
    assert {row.answer for row in kinds["name"]} == {"nothing"} | {
        f"{colour} {form}" for colour in COLOURS for form in FORMS
    }
    assert {row.answer for row in kinds["compare"]} == {"first", "second", "neither"}
    held_out = {(row.grids, row.question) for row in rows["eval"]}
    assert len(held_out) == len(rows["eval"]) == 60 and len(rows["train"]) == 600
    assert not {(row.grids, row.question) for row in rows["train"] + generate(8, 600, 60)["train"]} & held_out


def test_the_dataset_is_registered_and_gives_messages_and_pictures():
    raw = raw_dataset_of("shapes", DataArguments(), seed=3)
    assert (len(raw.get_train_data()), len(raw.get_eval_data())) == (TRAINING_ROWS, HELD_OUT_ROWS)
    row = next(row for row in raw.get_train_data() if row.kind == "compare")
    assert raw.get_prompt_messages(row) == [
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": row.question}]}
    ]
    assert raw.get_chosen_messages(row) == [{"role": "assistant", "content": row.answer}]
    assert raw.get_rejected_messages(row) == [{"role": "assistant", "content": row.wrong}]
    assert raw.get_reference(row) == row.answer
    assert [picture.tobytes() for picture in raw.get_images(row)] == [picture_of(grid).tobytes() for grid in row.grids]


def test_a_warm_cache_makes_no_rows(monkeypatch):
    from threestep.plugins.images.data import shapes
    from training.utils.data.fingerprint import content_of_dataset

    made = []
    monkeypatch.setattr(shapes, "generate", lambda seed: made.append(seed) or {"train": [], "eval": []})
    one, other = (raw_dataset_of("shapes", DataArguments(), seed) for seed in (1, 2))
    assert content_of_dataset(one, "") != content_of_dataset(other, "") and made == []


def test_rows_of_a_version_are_the_same():
    """Where they change, so must `ROWS_VERSION`."""

    def values():
        made = ShapesDataset("", 1, 0, "shapes")
        yield from texts_of(made)
        for scene in made.get_train_data()[:16]:
            for picture in made.get_images(scene):
                yield [*picture.size, hashlib.sha256(picture.tobytes()).hexdigest()]

    assert (ROWS_VERSION[:8], digest(values())) == ("32f21646", "a1534d821c0cde78")
