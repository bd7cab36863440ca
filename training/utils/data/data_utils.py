"""Serves DeepSpeed-Chat's dataset classes, which import `get_raw_dataset_split_index` from `.data_utils`."""

from __future__ import annotations

import numpy as np

from training.utils.base.errors import ThreestepError


def get_raw_dataset_split_index(
    local_rank: int,
    output_path: str,
    dataset_name: str,
    seed: int,
    split_name: str,
    data_split: str,
    split_index: int,
    data_size: int,
    rebuild: bool = False,
) -> list[int]:
    """Return the rows, out of 0 .. data_size - 1, of one part of a split by weights such as "9,1", in the order drawn.

    The rows are those that DeepSpeed-Chat draws with the same seed, but the parts of any split are disjoint and cover
    all rows. No file is written, so local_rank, output_path, dataset_name, split_name and rebuild have no effect.
    """
    try:
        weights = [float(weight) for weight in data_split.split(",")]
    except ValueError:
        weights = []
    if not weights or min(weights) < 0 or sum(weights) == 0 or not 0 <= split_index < len(weights):
        raise ThreestepError(
            "get_raw_dataset_split_index expects weights such as '9,1' and the index of one of them, got "
            f"'{data_split}' and {split_index}"
        )
    # By what is left for the later parts: so DeepSpeed-Chat divides two.
    begin, end = (
        data_size - round(sum(weights[first:]) / sum(weights) * data_size) for first in (split_index, split_index + 1)
    )
    order = np.arange(data_size)
    np.random.RandomState(seed).shuffle(order)
    return order[begin:end].tolist()
