"""What DeepSpeed-Chat's dataset classes import beside their base class."""

from __future__ import annotations

import numpy as np
import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.data_utils import get_raw_dataset_split_index

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

    def load_raw_datasets(self, dataset_name):
        return {"train": [{"q": f"What is {i}?", "good": str(i), "bad": "0" + str(i)} for i in range(40)]}

    def part(self, number):
        from .data_utils import get_raw_dataset_split_index

        rows = self.raw_datasets["train"]
        index = get_raw_dataset_split_index(
            self.local_rank, self.output_path, self.dataset_name_clean, self.seed, "train_eval", "9,1", number, 40
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

    def get_prompt_and_rejected(self, sample):
        return " Human: " + sample["q"] + " Assistant: " + sample["bad"]
"""


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
    (tmp_path / "acme.py").write_text(CLASS)
    data = flags(data_path=["acme/pairs"], dataset_module=[str(tmp_path / "acme.py")], data_split="1,1,1")
    for phase, rows in ((1, 12), (2, 12), (3, 12)):
        built = build_phase(phase, data, tiny_tokenizer, seed=1)
        assert (len(built.train), len(built.eval)) == (rows, 4)
        assert not built.report.train.noted
