"""Batches are moved whole, with the records inside them, and pinned for a GPU alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.cuda_stand_in.device import counted
from training.utils.base.transfer import moved, pinned
from training.utils.contracts.documents import join
from training.utils.layout.rows import RankedRows, padded_rows

CPU = torch.device("cpu")


def batch() -> RankedRows:
    rows = padded_rows([join(torch.tensor([1, 2]), torch.tensor([3])), join(torch.tensor([4]), torch.tensor([5]))], 0)
    return RankedRows(rows, torch.tensor([0]), torch.tensor([1]), torch.tensor([1.0]))


def test_on_a_cpu_nothing_is_copied():
    made = batch()
    assert pinned(made, CPU) is made
    assert moved(made, CPU).rows.input_ids_NT is made.rows.input_ids_NT


def test_tensors_by_name_are_moved_too():
    @dataclass(frozen=True)
    class Named:
        columns: dict[str, torch.Tensor]

    there = moved(Named({"a": torch.tensor([1])}), "meta")
    assert there.columns["a"].device.type == "meta"


def on_the_device() -> dict:
    made = batch()
    with counted() as counts:
        there = moved(pinned(made, torch.device("cuda")), "cuda")
    parts = [*vars(there.rows).values(), there.better_Q, there.worse_Q, there.weight_Q]
    places = sorted({str(part.device) for part in parts if isinstance(part, torch.Tensor)})
    ids = there.rows.input_ids_NT.tolist()
    return {"places": places, "waits": counts.total("waits"), "copies": counts.total("to_device"), "ids": ids}


def test_to_a_gpu_every_tensor_is_copied_without_waiting(on_cuda):
    assert on_cuda(on_the_device) == {"places": ["cuda:0"], "waits": 0, "copies": 10, "ids": [[1, 2, 3], [4, 5, 0]]}
