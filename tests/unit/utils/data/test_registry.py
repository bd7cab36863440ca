"""Names lead to one class each; a wrong name is answered with the near ones."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.support.data_flags import raw_dataset_of
from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import (
    find_dataset,
    load_dataset_module,
    register_dataset,
    registered_names,
)

pytestmark = pytest.mark.usefixtures("own_registry")

OWN_MODULE = """
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import register_dataset

@register_dataset("custom")
class Custom(PromptRawDataset):
    def load_raw_datasets(self, dataset_name):
        self.seen_dir = self.dataset_dir
        return {"train": [{"q": "1", "a": "2"}]}
    def get_train_data(self):
        return self.raw_datasets["train"]
"""


@pytest.fixture
def own_module(tmp_path):
    path = tmp_path / "my_data.py"
    path.write_text(OWN_MODULE)
    return str(path)


def test_a_class_of_the_users_own_file(own_module, flags):
    data = flags(data_path=["custom"], dataset_module=[own_module])
    raw = raw_dataset_of("custom", data, seed=7)
    assert type(raw).__name__ == "Custom" and raw.seed == 7 and raw.dataset_name == "custom"
    assert raw.get_train_data() == [{"q": "1", "a": "2"}]


def test_loading_a_module_twice_runs_it_once(own_module):
    assert load_dataset_module(own_module) is load_dataset_module(own_module)


def test_the_folder_is_there_while_the_constructor_runs(own_module, flags, tmp_path):
    (tmp_path / "custom").mkdir()
    place = str(tmp_path / "custom")
    raw = raw_dataset_of(place, flags(data_path=[place], dataset_module=[own_module]), seed=7)
    assert raw.seen_dir == raw.dataset_dir == place


@pytest.mark.needs_plugin("embedded")
def test_an_unknown_name_and_the_near_ones():
    with pytest.raises(ThreestepError, match="no dataset is registered as 'embeded'; did you mean") as e:
        find_dataset("embeded")
    assert "'embedded'" in str(e.value) and "--dataset_module" in str(e.value)


@pytest.mark.needs_plugin("embedded")
def test_an_unknown_name_near_none():
    with pytest.raises(ThreestepError, match="; known are .*embedded"):
        find_dataset("qqqqqqqqqqqqqqqq")


@pytest.mark.needs_plugin("embedded")
def test_a_path_that_ends_in_a_registered_name(tmp_path):
    folder = tmp_path / "mirror" / "embedded"
    folder.mkdir(parents=True)
    assert find_dataset(str(folder)) is find_dataset("embedded")
    assert find_dataset(f"{folder}/") is find_dataset("embedded")


@pytest.mark.needs_plugin("embedded")
def test_a_path_that_ends_in_a_registered_name_and_is_not_there():
    with pytest.raises(ThreestepError, match="ends in the registered name 'embedded', but does not exist"):
        find_dataset("/nowhere/embedded")


def test_a_name_that_only_contains_a_registered_one_is_unknown():
    # DeepSpeed-Chat matched substrings.
    with pytest.raises(ThreestepError, match="no dataset is registered"):
        find_dataset("embedded-v2")


def test_two_classes_for_one_name(own_module):
    load_dataset_module(own_module)
    with pytest.raises(ThreestepError, match="two dataset classes are registered as 'custom'") as caught:

        @register_dataset("custom")
        class Another(PromptRawDataset):
            pass

    assert "Custom in " in str(caught.value) and "my_data.py" in str(caught.value)
    assert "Another in " in str(caught.value) and "test_registry.py" in str(caught.value)


@pytest.mark.needs_plugin("embedded")
def test_one_class_under_two_names():
    @register_dataset("first", "second")
    class Both(PromptRawDataset):
        pass

    assert find_dataset("first") is find_dataset("second") is Both
    assert {"first", "second", "embedded"} <= set(registered_names())


@pytest.mark.parametrize(
    ("source", "fragment"),
    [("def broken(:\n", "SyntaxError"), ("import no_such_package_at_all\n", "ModuleNotFoundError")],
)
def test_a_module_that_does_not_load(tmp_path, source, fragment):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ThreestepError, match=f"does not load: {fragment}"):
        load_dataset_module(str(path))


def test_a_module_that_is_none(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for path, why in (("missing.py", "there is no such file"), (str(tmp_path / "notes.txt"), "does not end in .py")):
        with pytest.raises(ThreestepError, match=f"^--dataset_module expects a Python file, got '{path}', .*{why}; c"):
            load_dataset_module(path)


@pytest.mark.needs_plugin("embedded")
def test_a_mistake_raised_while_a_module_loads_stays_itself(tmp_path):
    path = tmp_path / "clash.py"
    path.write_text(OWN_MODULE.replace('"custom"', '"embedded"'))
    registered_names()
    with pytest.raises(ThreestepError, match="^two dataset classes are registered as 'embedded'"):
        load_dataset_module(str(path))


def test_a_missing_local_file():
    with pytest.raises(ThreestepError, match="data_path: 'nowhere.jsonl' names a file that does not exist"):
        find_dataset("jsonl:nowhere.jsonl")


def test_a_deepspeed_chat_subclass_works_unchanged(tmp_path, flags, tiny_tokenizer):
    """As its users wrote them: four arguments, super().__init__ loads by name, attributes set after it."""
    import datasets

    saved = tmp_path / "acme" / "pairs"
    rows = [{"q": f"{i}?", "good": "yes", "bad": "no"} for i in range(10)]
    split = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": split, "test": split.select([0, 1])}).save_to_disk(str(saved))
    path = tmp_path / "theirs.py"
    path.write_text(
        textwrap.dedent(
            """
            from training.utils.data.raw_dataset import PromptRawDataset
            from training.utils.data.registry import register_dataset

            @register_dataset("acme/pairs")
            class AcmeDataset(PromptRawDataset):
                def __init__(self, output_path, seed, local_rank, dataset_name):
                    super().__init__(output_path, seed, local_rank, dataset_name)
                    self.dataset_name = "acme/pairs"
                    self.dataset_name_clean = "acme_pairs"

                def get_train_data(self):
                    return self.raw_datasets["train"]

                def get_eval_data(self):
                    return self.raw_datasets["test"]

                def get_prompt(self, sample):
                    return "Human: " + sample["q"] + " Assistant:"

                def get_chosen(self, sample):
                    return " " + sample["good"]

                def get_rejected(self, sample):
                    return " " + sample["bad"]

                def get_prompt_and_chosen(self, sample):
                    return "Human: " + sample["q"] + " Assistant: " + sample["good"]

                def get_prompt_and_rejected(self, sample):
                    return "Human: " + sample["q"] + " Assistant: " + sample["bad"]
            """
        )
    )
    data = flags(dataset_module=[str(path)], data_path=[str(saved)], data_split="2,4,4")
    raw = raw_dataset_of(str(saved), data, seed=1)
    assert len(raw.get_train_data()) == 10 and len(raw.get_eval_data()) == 2
    assert raw.get_prompt_and_chosen(raw.get_train_data()[3]) == "Human: 3? Assistant: yes"
    phases = [build_phase(phase, data, tiny_tokenizer, seed=1) for phase in (1, 2, 3)]
    assert [(len(phase.train), len(phase.eval)) for phase in phases] == [(2, 2), (4, 2), (4, 2)]
    assert tiny_tokenizer.decode(phases[0].eval[1].input_ids) == "Human: 1? Assistant: yes<|endoftext|>"


def test_the_same_file_loaded_under_two_names_is_one_class(own_module):
    program = (
        "import importlib.util, sys;"
        "from training.utils.data.registry import load_dataset_module, find_dataset;"
        f"spec = importlib.util.spec_from_file_location('elsewhere', {own_module!r});"
        "module = importlib.util.module_from_spec(spec); sys.modules['elsewhere'] = module;"
        "spec.loader.exec_module(module);"
        f"load_dataset_module({own_module!r}); print(find_dataset('custom').__name__)"
    )
    got = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "Custom"
