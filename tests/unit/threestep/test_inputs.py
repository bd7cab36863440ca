"""What a call is given in memory becomes files and names, or is refused in one sentence."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from threestep.inputs import address_of_rows, with_addresses
from threestep.row_forms import is_in_memory
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import GIVEN, functions_given, load_function

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ä", "completion": "d"}]


def own_reward(prompts, responses, **columns):
    return [1.0 for _ in responses]


def other_reward(prompts, responses, **columns):
    return [0.0 for _ in responses]


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
        (3, r"^rows expects dicts in a list or an iterable, a dict of columns, .*, a path or an address, got int$"),
        (
            [{"prompt": "a"}, {"prompt": object()}],
            r"^rows\[1\]\['prompt'\] expects text, numbers, lists or dicts, got o",
        ),
    ],
)
def test_other_rows(rows, sentence, tmp_path):
    with pytest.raises(ThreestepError, match=sentence):
        address_of_rows(rows, tmp_path / "given")
    assert not (tmp_path / "given").exists()


def test_texts_are_no_addresses(tmp_path):
    with pytest.raises(
        ThreestepError, match=r"got the text '2 \+ 3 = 5' as number 1; for texts give dicts: \[\{'text'"
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
        with pytest.raises(ThreestepError, match="^rows are others than those that the run in .*run began with"):
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
        with pytest.raises(
            ThreestepError, match=f"^eval_rows are others than those that the run in {tmp_path}/{number} b"
        ):
            others = ROWS[1:] if number != 1 else as_dataset(ROWS[1:])
            address_of_rows(rows, folder, True, eval_rows=others)


def test_held_out_rows_beside_a_path(tmp_path):
    with pytest.raises(
        ThreestepError, match="^eval_rows goes with rows in memory, and rows is a path or an address; put"
    ):
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
    with pytest.raises(ThreestepError, match="got one whose rows a transform makes as they are read"):
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
        ThreestepError, match="^reward: with num_ranks other processes call 'function', which expects a"
    ):
        with_addresses({"reward": lambda prompts, responses: []}, True)


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ([], "^reward expects a function, a name, a list of them or a dict of weights, got none$"),
        ([3], "^reward expects functions and names, got int$"),
        ({"gsm8k": "much"}, "^reward expects a number as the weight of 'gsm8k', got 'much'$"),
        ([lambda a: 1, lambda a: 2], "^reward: two functions are called 'function'; rename one of them$"),
    ],
)
def test_other_rewards(reward, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        with_addresses({"reward": reward}, False)


def test_an_object_that_is_called_is_a_function():
    scorer = SimpleNamespace()
    assert with_addresses({"checker": scorer}, False)[0] == {"checker": scorer}  # not callable: as it is
