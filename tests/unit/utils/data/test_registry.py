"""Names lead to one class each; the contract's defaults, loading by name, and a class of DeepSpeed-Chat as it is."""

from __future__ import annotations

import re
import subprocess
import sys

import datasets
import numpy as np
import pytest

from tests.support.data_flags import data_flags, raw_dataset_of, with_flags
from tests.support.mistakes import mistakes_of
from training.utils.base.errors import ThreestepError
from training.utils.data import raw_dataset
from training.utils.data.arguments import SourceArguments
from training.utils.data.build.build import build_phase
from training.utils.data.data_utils import get_raw_dataset_split_index
from training.utils.data.raw_dataset import PromptRawDataset, load_by_name
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
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("embeded", "there is no file or dataset 'embeded'; did you mean 'embedded'.*--dataset_module"),
        ("qqqqqqqqqqqqqqqq", "no file or dataset 'qqqqqqqqqqqqqqqq'; pass a file as jsonl:PATH"),
        ("pairz", "no file or dataset 'pairz'; did you mean 'pairs.csv'; pass a file"),
        ("/nowhere/embedded", "ends in the registered name 'embedded', but does not exist"),
        ("embedded-v2", "there is no file or dataset"),  # DeepSpeed-Chat matched substrings
        ("jsonl:nowhere.jsonl", "data_path: 'nowhere.jsonl' does not exist"),
    ],
)
def test_an_unknown_name(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.csv").touch()
    with pytest.raises(ThreestepError, match=said):
        find_dataset(name)


@pytest.mark.needs_plugin("embedded")
def test_a_path_that_ends_in_a_registered_name(tmp_path):
    folder = tmp_path / "mirror" / "embedded"
    folder.mkdir(parents=True)
    assert find_dataset(str(folder)) is find_dataset(f"{folder}/") is find_dataset("embedded")


def test_two_classes_for_one_name(own_module):
    load_dataset_module(own_module)
    with pytest.raises(ThreestepError, match="two dataset classes are registered as 'custom'") as caught:

        @register_dataset("custom")
        class Another(PromptRawDataset):
            pass

    assert "Custom in " in str(caught.value) and "my_data.py" in str(caught.value)
    assert "Another in " in str(caught.value) and "test_registry.py" in str(caught.value)


def test_a_class_without_the_decorator_is_named(tmp_path):
    path = tmp_path / "undecorated.py"
    path.write_text(OWN_MODULE.replace('@register_dataset("custom")\n', ""))
    said = "^--dataset_module: '.*undecorated.py' registers no dataset; add above class Custom: `from threestep.*"
    sentence, _ = mistakes_of(SourceArguments(data_path=["mine"], dataset_module=[str(path)]))
    assert re.match(said + '`@register_dataset."mine".` .--data_path mine.$', sentence)


DEEPSPEED_CHATS = """
from threestep.training.utils.data.registry import register_dataset

class PromptRawDataset(object):
    def __init__(self, output_path, seed, local_rank, dataset_name): ...
    def get_train_data(self): ...

@register_dataset("custom")
class Custom(PromptRawDataset): ...
"""
BASE = "from threestep.training.utils.data.raw_dataset import PromptRawDataset"


def test_a_class_of_deepspeed_chats_own_base_is_refused(tmp_path):
    path = tmp_path / "raw_datasets.py"
    path.write_text(DEEPSPEED_CHATS)
    with pytest.raises(ThreestepError) as caught:
        load_dataset_module(str(path))
    assert str(caught.value) == (
        f"@register_dataset expects a subclass of Threestep's PromptRawDataset, got Custom in {path}; delete a "
        f"PromptRawDataset of that file's own, and import `{BASE}`"
    )
    path.write_text(DEEPSPEED_CHATS.replace('@register_dataset("custom")\n', ""))
    with pytest.raises(ThreestepError, match="registers no dataset; add above class Custom: `from threestep"):
        load_dataset_module(str(path))


def test_an_import_of_dschat_is_named_with_its_line_and_what_to_write(tmp_path):
    path = tmp_path / "acme.py"
    path.write_text("import os\nfrom dschat.utils.data.raw_datasets import PromptRawDataset\n")
    with pytest.raises(ThreestepError) as caught:
        load_dataset_module(str(path))
    assert str(caught.value) == (
        f"--dataset_module: '{path}' does not load: ModuleNotFoundError: No module named 'dschat' (line 2); import "
        f"`{BASE}` and `from threestep.training.utils.data.data_utils import get_raw_dataset_split_index` instead"
    )


def test_a_constructor_of_more_arguments_is_refused_with_those_that_are_passed(tmp_path, flags):
    path = tmp_path / "local_json.py"
    takes = "output_path, seed, local_rank, dataset_name, chat_path"
    path.write_text(OWN_MODULE + f"    def __init__(self, {takes}): ...\n")
    with pytest.raises(ThreestepError) as caught:
        raw_dataset_of("custom", flags(data_path=["custom"], dataset_module=[str(path)]), seed=7)
    assert str(caught.value) == (
        "--data_path custom expects a class of (output_path, seed, local_rank, dataset_name), got 'Custom in "
        f"{path}, line 12', which takes ({takes}): missing a required "
        "argument: 'chat_path'"
    )


@pytest.mark.needs_plugin("embedded")
def test_one_class_under_two_names():
    @register_dataset("first", "second")
    class Both(PromptRawDataset):
        pass

    assert find_dataset("first") is find_dataset("second") is Both
    assert {"first", "second", "embedded"} <= set(registered_names())


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("broken.py", "def broken(:\n", "does not load: SyntaxError"),
        ("broken.py", "import no_such_package_at_all\n", "does not load: ModuleNotFoundError"),
        ("missing.py", None, "^--dataset_module expects a Python file, got .*missing.py', which does not exist; c"),
        ("notes.txt", "", "^--dataset_module expects a Python file, got .*notes.txt', .*does not end in .py; c"),
    ],
)
def test_a_module_that_does_not_load(tmp_path, name, source, said):
    if source is not None:
        (tmp_path / name).write_text(source)
    with pytest.raises(ThreestepError, match=said):
        load_dataset_module(str(tmp_path / name))


@pytest.mark.needs_plugin("embedded")
def test_a_mistake_raised_while_a_module_loads_stays_itself(tmp_path):
    path = tmp_path / "clash.py"
    path.write_text(OWN_MODULE.replace('"custom"', '"embedded"'))
    registered_names()
    with pytest.raises(ThreestepError, match="^two dataset classes are registered as 'embedded'"):
        load_dataset_module(str(path))


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
    with pytest.raises(NotImplementedError, match="Plain has no get_train_data"):
        raw.get_train_data()


def test_a_folder_that_save_to_disk_wrote_and_one_of_files(tmp_path):
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


# As DeepSpeed-Chat's classes look: the base class by the import of this project, everything else by theirs.
CLASS = """
from torch.utils.data import Subset

from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import register_dataset


@register_dataset("acme/pairs")
class AcmePairs(PromptRawDataset):
    def __init__(self, output_path, seed, local_rank, dataset_name):
        super().__init__(output_path, seed, local_rank, dataset_name)
        self.dataset_name = "acme/pairs"
        self.dataset_name_clean = "acme_pairs"

    def part(self, number):
        from .data_utils import get_raw_dataset_split_index

        rows = self.raw_datasets["train"]
        index = get_raw_dataset_split_index(
            self.local_rank, self.output_path, self.dataset_name_clean, self.seed, "train_eval", "9,1", number, 40,
            False,
        )
        return Subset(rows, index)

    def get_train_data(self):
        return self.part(0)

    def get_eval_data(self):
        return self.part(1)

    def get_prompt(self, sample):
        return " Human: " + sample["q"] + " Assistant:"

    def get_chosen(self, sample):
        return " " + sample["good"]

    def get_rejected(self, sample):
        return " " + sample["bad"]

    def get_prompt_and_chosen(self, sample):
        return " Human: " + sample["q"] + " Assistant: " + sample["good"]

"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("local_rank, dataset_name):", "local_rank, dataset_name, chat_path):"),
            "missing a required argument: .chat_path",
        ),
        (("super()", "open('/nowhere'); super()"), "raised FileNotFoundError: .*nowhere.*acme_pairs.py, line"),
        (
            ("return self.part(0)", "return self.rows"),
            r"get_train_data raised AttributeError: .*'rows' .acme_pairs.py, line",
        ),
    ],
)
def test_errors_of_a_class_are_one_sentence(change, said, tmp_path, monkeypatch, tiny_tokenizer):
    (tmp_path / "acme_pairs.py").write_text(CLASS.replace(*change).replace("acme/pairs", "acme/broken"))
    data = data_flags(dataset_module=[str(tmp_path / "acme_pairs.py")], data_path=["acme/broken"])
    monkeypatch.setattr(raw_dataset, "load_by_name", lambda *_: {"train": []})
    with pytest.raises(ThreestepError, match=said):
        build_phase(1, with_flags(data, data_output_path=str(tmp_path / "cache")), tiny_tokenizer, 1)


def part(number: int, size: int, weights: str = "9,1", seed: int = 1234) -> list[int]:
    return get_raw_dataset_split_index(0, "/nowhere", "acme", seed, "train_eval", weights, number, size)


def test_a_part_is_deepspeed_chats():
    """numpy's legacy generator shuffles 0 .. 9 by the seed; the first nine are part 0 of 9,1."""
    order = np.arange(10)
    np.random.RandomState(1234).shuffle(order)
    assert order.tolist() == [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]
    assert part(0, 10) == [7, 2, 9, 1, 0, 8, 4, 5, 6] and part(1, 10) == [3]


@pytest.mark.parametrize("weights", ["9,1", "2,4,4", "0,5,5", "1,1,1,1,1,1,1"])
@pytest.mark.parametrize("size", [1, 7, 15, 7475])
def test_parts_are_disjoint_and_cover_all_rows(weights, size):
    parts = [part(number, size, weights) for number in range(weights.count(",") + 1)]
    assert sorted(index for own in parts for index in own) == list(range(size))
    assert not (weights == "0,5,5" and parts[0])


@pytest.mark.parametrize(("weights", "number"), [("nine", 0), ("9,1", 2), ("0,0", 0), ("-1,2", 0)])
def test_weights_that_are_none(weights, number):
    with pytest.raises(
        ThreestepError, match="^get_raw_dataset_split_index expects weights such as '9,1' and the index"
    ):
        part(number, 10, weights)


def test_a_class_of_deepspeed_chat_works_as_it_is(own_registry, flags, tiny_tokenizer, tmp_path):
    """As its users wrote them: four arguments, super().__init__ loads by name, attributes set after it."""
    saved = tmp_path / "acme" / "pairs"
    rows = [{"q": f"What is {i}?", "good": str(i), "bad": "0" + str(i)} for i in range(40)]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(saved))
    (tmp_path / "acme.py").write_text(CLASS)
    data = flags(data_path=[str(saved)], dataset_module=[str(tmp_path / "acme.py")], data_split="1,1,1")
    for phase in (1, 2, 3):
        built = build_phase(phase, data, tiny_tokenizer, seed=1)
        assert (len(built.train), len(built.eval), dict(built.report.train.noted)) == (12, 4, {})
    raw = raw_dataset_of(str(saved), data, seed=1)
    assert raw.get_prompt_and_chosen(raw.raw_datasets["train"][3]) == " Human: What is 3? Assistant: 3"


def test_a_class_that_gets_its_rows_elsewhere_asks_no_hub(monkeypatch):
    """As DeepSpeed-Chat's classes do, which call the constructor with a name of theirs."""
    asked = []
    monkeypatch.setattr(raw_dataset, "load_by_name", lambda name: asked.append(name) or {"train": [1]})

    class Mine(PromptRawDataset):
        def __init__(self, output_path, seed, local_rank, dataset_name):
            super().__init__(output_path, seed, local_rank, "my_internal_name")

        def get_train_data(self):
            return [{"text": "a"}]

    mine = Mine("", 1, 0, "mine")
    assert mine.get_train_data() and asked == []
    assert mine.raw_datasets == mine.raw_datasets == {"train": [1]} and asked == ["my_internal_name"]
