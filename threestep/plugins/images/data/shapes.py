"""The shapes: coloured shapes on small grids, drawn by code, and questions that have one right answer each.

    [picture] How many shapes?                                3
    [picture] What is in the southwest?                       red square
    [picture] [picture] Which picture has more shapes?        first

Registered as `shapes`; serves `--data_path shapes`. A model that reads images learns on it to see, from random weights
in minutes, without third-party files. Knows nothing of tokens, splits or models.

A picture is a `Grid` of one to four cells, each empty or with a shape: the smallest grids are easily seen, so that a
model soon has something to build on. The kinds of questions are `KINDS`. The answer is exact: `--reward exact_match`
compares a response with it. The chosen response is the answer; the rejected one is a slip of the same form: a count
that is one off, another shape, colour or place, another of three words.

The same seed gives the same rows on every machine and Python version: see `embedded.task.Draws`. Pictures and question
alone decide whether a row is held out for evaluation, so those of training and of evaluation differ even between seeds.
Training rows may come twice, since there are few small grids.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from threestep.plugins.embedded.task import Draws
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import register_dataset

if TYPE_CHECKING:
    from PIL.Image import Image

# Another whenever the same sources make other rows (see `fingerprint`).
ROWS_VERSION = "32f21646365325e7d4ac0d9e746be335d8d56353cff415345d45df44cdc8c3e6"
TRAINING_ROWS = 9_000
HELD_OUT_ROWS = 400
HELD_OUT_SHARE = 16  # one row in 16 is held out

CELL_PIXELS, SHAPE_PIXELS = 28, 20
MARGIN_PIXELS = (CELL_PIXELS - SHAPE_PIXELS) // 2
FORMS = ("circle", "square", "triangle")
COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180)}
BACKGROUND = (255, 255, 255)
EMPTY_CELLS, FULL_CELLS = 1, 2  # weights of a cell without and with a shape
# The places of a grid by its rows and columns, row by row, as on a map.
PLACES = {
    (1, 1): ("middle",),
    (1, 2): ("west", "east"),
    (2, 1): ("north", "south"),
    (2, 2): ("northwest", "northeast", "southwest", "southeast"),
}
NOTHING = "nothing"
FIRST, SECOND, EQUAL = "first", "second", "neither"


class Shape(NamedTuple):
    """The content of a cell."""

    colour: str
    form: str


class Grid(NamedTuple):
    """cells: row by row; None is an empty one."""

    columns: int
    cells: tuple[Shape | None, ...]

    @property
    def rows(self) -> int:
        return len(self.cells) // self.columns

    @property
    def shapes(self) -> int:
        """Number of cells that hold a shape."""
        return sum(shape is not None for shape in self.cells)


@dataclass(frozen=True)
class Scene:
    """One row: its pictures, the question, the answer and a wrong one."""

    kind: str
    grids: tuple[Grid, ...]
    question: str
    answer: str
    wrong: str

    @property
    def is_held_out(self) -> bool:
        """True if it belongs to the held-out rows, for every seed."""
        return zlib.crc32(repr((self.grids, self.question)).encode()) % HELD_OUT_SHARE == 0


def generate(
    seed: int, training_rows: int = TRAINING_ROWS, held_out_rows: int = HELD_OUT_ROWS
) -> dict[str, list[Scene]]:
    """Return `training_rows` rows under "train" and `held_out_rows` under "eval": all of them different, and as many of
    each kind."""
    draws = Draws(seed)
    train: list[Scene] = []
    while len(train) < training_rows:
        scene = draws.one_of(KINDS)(draws)
        if not scene.is_held_out:
            train.append(scene)
    held_out: dict[tuple[tuple[Grid, ...], str], Scene] = {}
    while len(held_out) < held_out_rows:
        scene = KINDS[len(held_out) % len(KINDS)](draws)
        if scene.is_held_out:
            held_out.setdefault((scene.grids, scene.question), scene)
    return {"train": train, "eval": list(held_out.values())}


def picture_of(grid: Grid) -> Image:
    """Draw a grid: each cell a square of `CELL_PIXELS`, its shape in the middle."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (grid.columns * CELL_PIXELS, grid.rows * CELL_PIXELS), BACKGROUND)
    pen = ImageDraw.Draw(picture)
    for place, shape in enumerate(grid.cells):
        if shape is None:
            continue
        row, column = divmod(place, grid.columns)
        left, top = column * CELL_PIXELS + MARGIN_PIXELS, row * CELL_PIXELS + MARGIN_PIXELS
        right, bottom = left + SHAPE_PIXELS - 1, top + SHAPE_PIXELS - 1
        colour = COLOURS[shape.colour]
        if shape.form == "circle":
            pen.ellipse((left, top, right, bottom), colour)
        elif shape.form == "square":
            pen.rectangle((left, top, right, bottom), colour)
        else:
            pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], colour)
    return picture


# The kinds.


def _grid(draws: Draws) -> Grid:
    rows, columns = draws.one_of(tuple(PLACES))
    cells = (_shape(draws) if draws.weighted((EMPTY_CELLS, FULL_CELLS)) else None for _ in range(rows * columns))
    return Grid(columns, tuple(cells))


def _shape(draws: Draws) -> Shape:
    return Shape(draws.one_of(tuple(COLOURS)), draws.one_of(FORMS))


def _how_many(draws: Draws) -> Scene:
    grid = _grid(draws)
    count = grid.shapes
    wrong = draws.one_of([number for number in (count - 1, count + 1) if 0 <= number <= len(grid.cells)])
    return Scene("count", (grid,), "How many shapes?", str(count), str(wrong))


def _what_is_in(draws: Draws) -> Scene:
    grid = _grid(draws)
    place = draws.below(len(grid.cells))
    shape = grid.cells[place]
    others = [other for other in grid.cells if other != shape]
    if shape is not None:
        others += [Shape(colour, shape.form) for colour in COLOURS if colour != shape.colour]
        others += [Shape(shape.colour, form) for form in FORMS if form != shape.form]
    others = others or [_shape(draws)]
    question = f"What is in the {PLACES[grid.rows, grid.columns][place]}?"
    return Scene("name", (grid,), question, _words(shape), _words(draws.one_of(others)))


def _which_has_more(draws: Draws) -> Scene:
    grids = _grid(draws), _grid(draws)
    first, second = (grid.shapes for grid in grids)
    answer = FIRST if first > second else SECOND if second > first else EQUAL
    wrong = draws.one_of([word for word in (FIRST, SECOND, EQUAL) if word != answer])
    return Scene("compare", grids, "Which picture has more shapes?", answer, wrong)


def _words(shape: Shape | None) -> str:
    return NOTHING if shape is None else " ".join(shape)


KINDS: tuple[Callable[[Draws], Scene], ...] = (_how_many, _what_is_in, _which_has_more)


@register_dataset("shapes")
class ShapesDataset(PromptRawDataset):
    """The shapes as a raw dataset; its rows are made from the run's seed."""

    def load_raw_datasets(self, dataset_name: str) -> None:
        """Rows are generated when first read, and pictures drawn when needed: a run that finds its cache makes
        none."""

    @cached_property
    def _rows(self) -> dict[str, list[Scene]]:
        return generate(self.seed)

    def get_fingerprint(self) -> str:
        """The rows follow from the seed and this file, which is in every fingerprint (`code_of_class`)."""
        return f"seed {self.seed}"

    def get_train_data(self) -> Sequence[Scene]:
        return self._rows["train"]

    def get_eval_data(self) -> Sequence[Scene]:
        return self._rows["eval"]

    def get_images(self, sample: Scene) -> list[Image]:
        return [picture_of(grid) for grid in sample.grids]

    def get_prompt_messages(self, sample: Scene) -> list[dict[str, Any]]:
        places = [{"type": "image"} for _ in sample.grids]
        return [{"role": "user", "content": [*places, {"type": "text", "text": sample.question}]}]

    def get_chosen_messages(self, sample: Scene) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": sample.answer}]

    def get_rejected_messages(self, sample: Scene) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": sample.wrong}]

    def get_reference(self, sample: Scene) -> str:
        """The right answer."""
        return sample.answer
