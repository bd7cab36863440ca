"""The contract's defaults, and loading by name."""

from __future__ import annotations

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.raw_dataset import PromptRawDataset, load_by_name


class Plain(PromptRawDataset):
    def load_raw_datasets(self, dataset_name):
        return None

    def get_prompt(self, sample):
        return sample["p"]

    def get_chosen(self, sample):
        return sample["c"]


def test_sentences_are_prompt_and_response():
    raw = Plain("out", 1, 0, "a/b")
    assert raw.get_prompt_and_chosen({"p": "P:", "c": " c"}) == "P: c"
    assert raw.get_prompt_and_chosen({"p": "P:", "c": None}) is None
    assert raw.get_prompt_and_rejected({"p": "P:", "c": " c"}) is None
    assert (raw.dataset_name, raw.dataset_clean_name, raw.dataset_dir) == ("a/b", "a_b", None)


def test_what_is_optional_stays_out_of_the_way():
    raw = Plain("out", 1, 0, "a")
    assert raw.get_eval_data() is None and raw.get_reference({}) is None and raw.get_responses({}) is None
    assert raw.get_margin({}) is None
    assert raw.get_phases({}) == (1, 2, 3) and raw.get_fingerprint() is None and raw.check_phase(2) is None


def test_a_class_without_rows_says_so():
    with pytest.raises(NotImplementedError, match="Plain has no get_train_data"):
        Plain("out", 1, 0, "a").get_train_data()


def test_a_folder_that_save_to_disk_wrote_and_one_of_files(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    rows.save_to_disk(str(tmp_path / "saved"))
    assert load_by_name(str(tmp_path / "saved"))["text"][1] == "b"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"text": "c"}\n')
    assert load_by_name(str(tmp_path / "files"))["train"][0] == {"text": "c"}


def test_what_cannot_be_loaded_is_one_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ThreestepError, match="could not be loaded from the folder"):
        load_by_name(str(tmp_path / "empty"))
    with pytest.raises(ThreestepError, match="'no-such/name' could not be loaded from the hub.*check the name"):
        load_by_name("no-such/name")
