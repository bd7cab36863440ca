"""What a call is given in memory becomes files and names, or is refused in one sentence: rows in the forms that people
hold them in, and functions."""

from __future__ import annotations

import collections
import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from threestep.inputs import address_of_rows, with_addresses
from threestep.row_forms import held_rows, is_in_memory
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import GIVEN, functions_given, load_function

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ä", "completion": None}]


def own_reward(prompts, responses, **columns):
    return [1.0 for _ in responses]


def test_rows_are_written_as_they_are(tmp_path):
    (address,) = address_of_rows(ROWS, tmp_path / "given")
    assert address == f"jsonl:{tmp_path}/given/given_rows.jsonl"
    assert [json.loads(line) for line in open(address.removeprefix("jsonl:"), encoding="utf-8")] == ROWS


def test_a_dataset_is_written_with_its_types(tmp_path):
    datasets = pytest.importorskip("datasets")
    (address,) = address_of_rows(datasets.Dataset.from_list(ROWS), tmp_path)
    assert datasets.Dataset.from_parquet(address.removeprefix("parquet:"), cache_dir=str(tmp_path)).to_list() == ROWS


def test_paths_and_addresses_stay(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    assert address_of_rows(path, tmp_path) == [f"jsonl:{path}"]
    assert address_of_rows(["embedded", f"csv:{path}"], tmp_path) == ["embedded", f"csv:{path}"]
    assert address_of_rows("no/such/rows.jsonl", tmp_path) == ["no/such/rows.jsonl"]  # the run says what is wrong
    assert not any(map(is_in_memory, (path, "embedded", ["embedded"]))) and is_in_memory(ROWS)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], r"^rows expects at least one row, got none$"),
        (3, r"^rows expects a list or an iterable of dicts, a dict of columns, .*, a path or an address, got int$"),
        ([{"prompt": "a"}, {"prompt": object()}], r"^rows\[1\]\['prompt'\] expects text, numbers, lists or dicts, got"),
    ],
)
def test_other_rows(rows, sentence, tmp_path):
    with pytest.raises(ThreestepError, match=sentence):
        address_of_rows(rows, tmp_path / "given")
    assert not (tmp_path / "given").exists()


def test_texts_are_no_addresses(tmp_path):
    with pytest.raises(
        ThreestepError, match=r"got the string '2 \+ 3 = 5' at index 1; to train on strings, pass dicts: \[\{'text'"
    ):
        address_of_rows(["embedded", "2 + 3 = 5"], tmp_path)
    (tmp_path / "my rows.jsonl").touch()
    named = [str(tmp_path / "my rows.jsonl"), f"jsonl:{tmp_path}/my rows.jsonl"]
    assert address_of_rows(named, tmp_path)[1] == named[1]


def test_rows_of_a_resumed_run_are_those_that_it_began_with(tmp_path):
    datasets = pytest.importorskip("datasets")
    for rows, others in ((ROWS, ROWS[:1]), (datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1]))):
        folder = tmp_path / "run" / "given"
        address = address_of_rows(rows, folder)
        assert address_of_rows(rows, folder, resumes=True) == address
        written = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(ThreestepError, match="^rows differ from those that the run in .*run started with"):
            address_of_rows(others, folder, resumes=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")} == written


def test_held_out_rows_are_a_file_of_the_same_folder(tmp_path):
    """Which is how a run reads evaluation rows."""
    from training.utils.data.files.readers import stored_rows

    datasets = pytest.importorskip("datasets")
    as_dataset = datasets.Dataset.from_list
    for number, (rows, held_out) in enumerate(
        ((ROWS, ROWS[:1]), (as_dataset(ROWS), as_dataset(ROWS[:1])), (as_dataset(ROWS), iter(ROWS[:1])))
    ):
        folder = tmp_path / str(number) / "given"
        (address,) = address_of_rows(rows, folder, eval_rows=held_out)
        train, evaluation = stored_rows(address, "data_path", str(tmp_path)).open()
        assert [dict(row) for row in train] == ROWS and [dict(row) for row in evaluation] == ROWS[:1]
        with pytest.raises(ThreestepError, match=f"^eval_rows differ from those that the run in {tmp_path}/{number} s"):
            others = ROWS[1:] if number != 1 else as_dataset(ROWS[1:])
            address_of_rows(rows, folder, True, eval_rows=others)


def test_held_out_rows_beside_a_path(tmp_path):
    with pytest.raises(ThreestepError, match="^eval_rows needs rows in memory, but rows is a path or an address; put"):
        address_of_rows("rows.jsonl", tmp_path, eval_rows=ROWS)


def test_values_of_libraries_are_plain(tmp_path):
    import datetime

    import numpy

    row = {"prompt": "a", "n": numpy.int64(3), "many": numpy.array([1.5, 2]), "day": datetime.date(2026, 5, 1)}
    (address,) = address_of_rows([row], tmp_path)
    (line,) = open(address.removeprefix("jsonl:"))
    assert json.loads(line) == {"prompt": "a", "n": 3, "many": [1.5, 2.0], "day": "2026-05-01"}


def test_a_dataset_is_taken_as_it_shows_itself(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    with pytest.raises(ThreestepError, match="got one that uses set_transform"):
        address_of_rows(rows.with_transform(lambda batch: batch), tmp_path)
    (address,) = address_of_rows(rows.with_format(columns=["prompt"]), tmp_path)
    read = datasets.Dataset.from_parquet(address.removeprefix("parquet:"), cache_dir=str(tmp_path))
    assert read.column_names == ["prompt"]


def test_functions_are_named(tmp_path):
    plain, functions = with_addresses({"checker": own_reward, "seed": 3, "reward": [own_reward, "gsm8k:0.5"]}, False)
    address = f"{GIVEN}own_reward"
    assert plain == {"checker": address, "seed": 3, "reward": f"{address}:1.0,gsm8k:0.5"}
    with functions_given(functions):
        assert load_function(address, "--checker") is own_reward
    with pytest.raises(ThreestepError, match="^--checker: 'given:own_reward' was a function of the Python program"):
        load_function(address, "--checker")


def test_weights_and_names():
    assert with_addresses({"reward": "model:0.5"}, False)[0] == {"reward": "model:0.5"}
    given = {own_reward: 2, "length": 0.25}
    assert with_addresses({"reward": given}, False)[0] == {"reward": f"{GIVEN}own_reward:2,length:0.25"}


def test_on_ranks_a_function_is_one_of_a_file():
    plain, functions = with_addresses({"reward": own_reward}, True)
    assert plain["reward"] == f"{__file__}:own_reward:1.0" and functions == {}
    with pytest.raises(
        ThreestepError, match="^reward: with num_ranks, other processes import 'function', so it must be"
    ):
        with_addresses({"reward": lambda prompts, responses: []}, True)


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ([], "^reward expects a function, a name, a list of these or a dict of weights, got none$"),
        ([3], "^reward expects functions or names, got int$"),
        ({"gsm8k": "much"}, "^reward expects a number as the weight of 'gsm8k', got 'much'$"),
        ([lambda a: 1, lambda a: 2], "^reward: two functions are named 'function'; rename one of them$"),
    ],
)
def test_other_rewards(reward, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        with_addresses({"reward": reward}, False)


def test_an_object_that_is_called_is_a_function():
    scorer = SimpleNamespace()
    assert with_addresses({"checker": scorer}, False)[0] == {"checker": scorer}  # not callable: as it is


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
    with pytest.raises(ThreestepError, match="^rows expects distinct column names, got x twice; rename one$"):
        held_rows(twice)


def test_a_dict_of_columns():
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    columns = {"prompt": ["a", "ä"], "completion": ("b", None)}
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
    with pytest.raises(ThreestepError, match="got a polars Series; pass the DataFrame"):
        held_rows(polars.DataFrame(ROWS)["prompt"])


def test_tables_and_torchs_datasets():
    pyarrow, torch = pytest.importorskip("pyarrow"), pytest.importorskip("torch")

    class Mapped(torch.utils.data.Dataset):
        def __len__(self):
            return len(ROWS)

        def __getitem__(self, index):
            return ROWS[index]

    assert in_both(lambda: pyarrow.Table.from_pylist(ROWS)) == in_both(Mapped) == ROWS
    with pytest.raises(ThreestepError, match="got a torch DataLoader; it yields batches; pass the rows it reads$"):
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
        ({"train": ROWS, "test": ROWS, "validation": ROWS}, "got dict with train, test, validation; pass two of"),
        (
            {"train_sft": ROWS, "train_prefs": ROWS},
            r"got dict with train_sft, train_prefs; pass two of them separately: rows\[",
        ),
        ({}, "got dict with none"),
        ({"prompt": ["a", "b"], "completion": ["b"]}, "lists of equal length, got 2 for 'prompt', 1 for 'completion'$"),
        ({"prompt": ["a"], "completion": "b"}, "^rows: a dict of columns needs a list for each column, but 'comp"),
        ({"prompt": "a", "completion": "b"}, r"got one row; pass a list of rows: \[rows\]$"),
        ({"train": {"prompt": ["a", "b"], "completion": ["b"]}}, r"^rows\['train'\]: a dict of columns needs"),
        ({"prompt": [], "completion": []}, "got dict with prompt, completion; pass two of them"),
        (iter([]), "^rows expects at least one row, got none$"),
        ((text for text in "ab"), r"got str at rows\[0\]; pass \{'text': row\} for each text to train on unch"),
        ([ROWS[0], Example("a")], r"got Example at rows\[1\]; pass \[dataclasses.asdict\(row\) for row in rows\]$"),
        ([Named("a")], r"got Named at rows\[0\]; pass \[row._asdict\(\) for row in rows\]$"),
        (len, "got builtin_function_or_method$"),
    ],
)
def test_other_rows_of_forms(rows, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        held_rows(rows)


def test_an_unknown_frame_names_what_to_write():
    class Frame:
        def to_dict(self, orient):
            return ROWS

    with pytest.raises(ThreestepError, match=r'Frame; pass rows.to_dict\("records"\)$'):
        held_rows(Frame())


def test_held_out_rows_come_once():
    with pytest.raises(ThreestepError, match=r"^rows already has a split test, but eval_rows is passed too; pass"):
        held_rows({"train": ROWS, "test": ROWS}, ROWS)
    with pytest.raises(ThreestepError, match="^eval_rows expects a list .*, got str 'x.jsonl'; put held-out rows in"):
        held_rows(ROWS, "x.jsonl")


def test_no_library_of_frames_is_imported_for_rows_that_are_none():
    code = (
        "import sys; from threestep.row_forms import held_rows; held_rows(iter([{'prompt': 'a'}]));"
        "print([name for name in ('pandas', 'polars', 'pyarrow', 'datasets', 'PIL', 'torch') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
