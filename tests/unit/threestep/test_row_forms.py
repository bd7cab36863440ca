"""Rows in the forms that people hold them in, or one sentence that names what to write."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys

import pytest

from threestep.row_forms import held_rows
from training.utils.base.errors import ThreestepError

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}]


def in_both(rows):
    """Read as `rows` and as `eval_rows`."""
    held = held_rows(rows(), rows())
    assert held.train == held.held_out
    return held.train


def test_iterables_are_read_once():
    drawn = []

    def generated():
        for row in ROWS:
            drawn.append(row)
            yield row

    assert held_rows(generated()).train == ROWS and drawn == ROWS
    assert in_both(lambda: iter(ROWS)) == in_both(lambda: tuple(ROWS)) == ROWS


def test_frames():
    pandas = pytest.importorskip("pandas")
    assert in_both(lambda: pandas.DataFrame(ROWS, index=[7, 9])) == ROWS
    missing = pandas.DataFrame({"n": [1.5, float("nan")], "t": [pandas.NaT, pandas.NaT], "l": [[1], []]})
    assert held_rows(missing).train == [{"n": 1.5, "t": None, "l": [1]}, {"n": None, "t": None, "l": []}]
    twice = pandas.DataFrame([[1, 2]], columns=["x", "x"])
    with pytest.raises(ThreestepError, match="^rows expects columns of different names, got x twice; rename one$"):
        held_rows(twice)


def test_a_dict_of_columns():
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    columns = {"prompt": ["a", "c"], "completion": ("b", None)}
    assert in_both(lambda: columns) == held_rows({"train": columns}).train == ROWS
    assert held_rows({"x": numpy.array([1, 2]), "y": pandas.Series([3, 4], index=[7, 9])}).train == [
        {"x": 1, "y": 3}, {"x": 2, "y": 4},
    ]  # fmt: skip
    talk = [{"role": "user", "content": "a"}]
    assert held_rows({"messages": [talk, talk]}).train == [{"messages": talk}] * 2
    # Objects in one column, and texts in another: no splits.
    assert held_rows({"tools": [{"a": 1}], "prompt": ["p"]}).train == [{"tools": {"a": 1}, "prompt": "p"}]


def test_frames_of_polars():
    polars = pytest.importorskip("polars")
    assert in_both(lambda: polars.DataFrame(ROWS)) == in_both(lambda: polars.DataFrame(ROWS).lazy()) == ROWS
    with pytest.raises(ThreestepError, match="got a polars Series; give the frame"):
        held_rows(polars.DataFrame(ROWS)["prompt"])


def test_tables_and_torchs_datasets():
    pyarrow, torch = pytest.importorskip("pyarrow"), pytest.importorskip("torch")

    class Mapped(torch.utils.data.Dataset):
        def __len__(self):
            return len(ROWS)

        def __getitem__(self, index):
            return ROWS[index]

    assert in_both(lambda: pyarrow.Table.from_pylist(ROWS)) == in_both(Mapped) == ROWS
    with pytest.raises(ThreestepError, match="got a torch DataLoader; it makes batches; give the rows that it reads$"):
        held_rows(torch.utils.data.DataLoader(Mapped()))


def test_splits():
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list(ROWS)
    both = held_rows(datasets.DatasetDict(train=split, test=split.select([0])))
    assert both.train is split and both.held_out.to_list() == ROWS[:1]
    assert held_rows({"train": ROWS, "validation": iter(ROWS[:1])}).held_out == ROWS[:1]
    assert held_rows({"train": ROWS}).held_out is None
    assert held_rows({"train": ROWS}, ROWS[:1]).held_out == ROWS[:1]
    streamed = datasets.DatasetDict(train=split)["train"].to_iterable_dataset()
    assert held_rows(streamed).train == ROWS


@dataclasses.dataclass
class Example:
    prompt: str


Named = collections.namedtuple("Named", "prompt")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"train": ROWS, "test": ROWS, "validation": ROWS}, r"got dict with train, test, validation; name two of"),
        ({"train_sft": ROWS, "train_prefs": ROWS}, r"got dict with train_sft, train_prefs; name two of them: rows\["),
        ({}, "got dict with none"),
        (
            {"prompt": ["a", "b"], "completion": ["b"]},
            r"^rows as a dict of columns expects lists of one length, got 2 of 'prompt', 1 of 'completion'$",
        ),
        ({"prompt": ["a"], "completion": "b"}, "^rows as a dict of columns expects a list for each, and 'completion'"),
        ({"prompt": "a", "completion": "b"}, r"got one row; give a list of rows: \[rows\]$"),
        ({"train": {"prompt": ["a", "b"], "completion": ["b"]}}, r"^rows\['train'\] as a dict of columns expects"),
        ({"prompt": [], "completion": []}, "got dict with prompt, completion; name two of them"),
        (iter([]), "^rows expects at least one row, got none$"),
        ((text for text in "ab"), r"got str as rows\[0\]; give \{'text': row\} for each text to train on as it is"),
        ([ROWS[0], Example("a")], r"got Example as rows\[1\]; give \[dataclasses.asdict\(row\) for row in rows\]$"),
        ([Named("a")], r"got Named as rows\[0\]; give \[row._asdict\(\) for row in rows\]$"),
        (len, "got builtin_function_or_method$"),
    ],
)
def test_other_rows(rows, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        held_rows(rows)


def test_an_unknown_frame_names_what_to_write():
    class Frame:
        def to_dict(self, orient):
            return ROWS

    with pytest.raises(ThreestepError, match=r'Frame; give rows.to_dict\("records"\)$'):
        held_rows(Frame())


def test_held_out_rows_come_once():
    with pytest.raises(ThreestepError, match=r"^rows has a split test, and eval_rows is given too; give"):
        held_rows({"train": ROWS, "test": ROWS}, ROWS)
    with pytest.raises(ThreestepError, match="^eval_rows expects dicts .*, got str 'x.jsonl'; held-out rows in files"):
        held_rows(ROWS, "x.jsonl")


def test_no_library_of_frames_is_imported_for_rows_that_are_none():
    code = (
        "import sys; from threestep.row_forms import held_rows; held_rows(iter([{'prompt': 'a'}]));"
        "print([name for name in ('pandas', 'polars', 'pyarrow', 'datasets', 'PIL', 'torch') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
