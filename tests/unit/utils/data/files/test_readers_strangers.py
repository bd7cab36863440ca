"""What no reader takes is called by its name, with what to give."""

from __future__ import annotations

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.files.readers import why_no_dataset
from training.utils.data.registry import find_dataset


def test_names_of_datasets_are_none():
    assert why_no_dataset("owner/name") is None and why_no_dataset("enbedded") is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("/nowhere/rows", "'/nowhere/rows' does not exist; the folder read from is '"),
        ("rows.xlsx", "'rows.xlsx' is a spreadsheet; save the sheet as CSV UTF-8"),
        ("rows.pkl.gz", "'rows.pkl.gz' is a pickle, which may run code"),
        ("mine.py", "is Python code; give it as --dataset_module, and the name that it registers as --data_path"),
    ],
)
def test_by_the_name(name, sentence):
    with pytest.raises(ThreestepError) as caught:
        find_dataset(name)
    assert str(caught.value).startswith("--data_path: ") and sentence in str(caught.value)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "is empty; give a folder or a file with rows"),
        (["config.json"], "holds a model, no data; give it as --model_name_or_path"),
        (["a.csv", "b.csv.gz", "c.parquet"], "holds files: 2 .csv, 1 .parquet; give it as parquet:{0} or csv:{0}"),
        (["a.json"], "holds files: 1 .json; give it as json:{0}"),
        (["a.png"], "holds files: 1 .png; and no file that a reader takes; give a folder of such files as jsonl:PATH"),
    ],
)
def test_by_the_content_of_a_folder(tmp_path, files, sentence):
    for name in files:
        (tmp_path / name).write_text("")
    assert sentence.format(tmp_path) in (why_no_dataset(str(tmp_path)) or "")
