"""Pairs of responses as rows of a file, and a dataset class whose rows a test gives."""

from __future__ import annotations

from training.utils.data.raw_dataset import PromptRawDataset

PAIR = {"prompt": "Human: What is 2 + 3? Assistant:", "chosen": " 2 + 3 is 5.", "rejected": " It is 4."}


def many(row, count=20):
    return [{**row, "prompt": f"Human: {i}? Assistant:"} for i in range(count)]


def all_rows(built):
    return [*built.train, *built.eval]


class Own(PromptRawDataset):
    """Rows are given by each test."""

    rows: list = [{"p": "Human: a Assistant:", "c": " b", "r": " c"}] * 20

    def load_raw_datasets(self, dataset_name):
        return None

    def get_train_data(self):
        return self.rows

    def get_prompt(self, sample):
        return sample["p"]

    def get_chosen(self, sample):
        return sample["c"]

    def get_rejected(self, sample):
        return sample["r"]
