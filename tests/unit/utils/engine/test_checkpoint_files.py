"""A state comes back from its file as it was, and no file runs code."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from training.utils.base.errors import ThreestepError
from training.utils.engine.checkpoint_files import (
    file_of,
    load_engine,
    plain_checkpoint_engine,
    plain_torch_files,
    read_state,
    write_state,
)

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


class Marker:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def there_and_back(tmp_path):
    """Write a state, and read it."""

    def carry(state: Any) -> Any:
        write_state(state, tmp_path / "state.safetensors")
        return read_state(tmp_path / "state.safetensors")

    return carry


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_each_kind(there_and_back, dtype):
    bytes_N = torch.randint(0, 2, (5 * 7 * 8,), dtype=torch.uint8)
    whole = bytes_N[: 5 * 7 * torch.empty((), dtype=dtype).element_size()].view(dtype).view(5, 7)
    given = {"whole": whole, "turned": whole.t(), "part": whole[1:4, ::2], "one": whole[0, 0], "none": whole[:0]}
    read = there_and_back(given)
    for name, tensor in given.items():
        assert read[name].dtype is dtype and read[name].shape == tensor.shape, name
        assert read[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))


def test_what_is_no_tensor(there_and_back):
    given = {
        "numbers": [0.1 + 0.2, float("inf"), -(2**70), True, None, "text \u00e9"],
        0: {"betas": (0.9, 0.95), 1.5: [], (1, "a"): {}},
        "shapes": OrderedDict(b=torch.Size([2, 3]), a=torch.Size([])),
        "dtype": torch.bfloat16,
        "tensor": "a dictionary whose key is a word of the format",
    }
    read = there_and_back(given)
    assert read == given and list(read["shapes"]) == ["b", "a"]
    assert [type(each) for each in read["numbers"]] == [type(each) for each in given["numbers"]]
    assert (type(read["shapes"]), type(read["shapes"]["b"]), type(read[0]["betas"])) == (OrderedDict, torch.Size, tuple)
    assert math.isnan(there_and_back([float("nan")])[0])


def test_the_classes_of_deepspeed(there_and_back):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    dynamic = DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 2, False, dtype=torch.half)
    dynamic.cur_iter = 7
    given = [dynamic, LossScaler(8.0), ZeroStageEnum.gradients, fragment_address(numel=3, start=4)]
    for made, read in zip(given, there_and_back(given), strict=True):
        assert type(read) is type(made)
        assert read is made if isinstance(made, ZeroStageEnum) else vars(read) == vars(made)


def test_a_tensor_in_two_places_stands_once_and_is_shared_again(there_and_back, tmp_path):
    weight = torch.nn.Parameter(torch.ones(1000, 10))
    read = there_and_back({"embedding": weight, "head": weight.data, "other": [weight.data[1:]]})
    assert read["embedding"].data_ptr() == read["head"].data_ptr()
    assert not read["head"].requires_grad and read["other"][0].equal(weight.data[1:])
    write_state({"embedding": weight, "head": weight.data}, tmp_path / "tied.safetensors")
    assert (tmp_path / "tied.safetensors").stat().st_size < 41_000


def test_safetensors_reads_it(tmp_path):
    """And it begins each tensor where its elements are aligned, whatever comes before it."""
    given = {"odd": torch.ones(3, dtype=torch.bool), "even": torch.arange(5.0), "half": torch.ones(1).half()}
    write_state(given, tmp_path / "a.safetensors")
    with safe_open(str(tmp_path / "a.safetensors"), framework="pt") as body:
        assert [body.get_tensor(str(number)).tolist() for number in range(3)] == [t.tolist() for t in given.values()]
    mapped = read_state(tmp_path / "a.safetensors", mapped=True)
    assert mapped["even"].data_ptr() % 4 == 0 and mapped["even"].equal(given["even"])


def test_what_was_read_does_not_depend_on_its_file(tmp_path):
    write_state([torch.ones(5000)], tmp_path / "a.safetensors")
    (read,) = read_state(tmp_path / "a.safetensors")
    with open(tmp_path / "a.safetensors", "r+b") as file:
        file.truncate(0)  # a mapped page of it would end the process
    assert read.sum() == 5000


def test_a_class_that_nobody_knows_is_not_written(tmp_path):
    with pytest.raises(
        ThreestepError, match=r"numbers and strings, but DeepSpeed's state has a pathlib.*; use the Deep"
    ):
        write_state({"a": [Path("b")]}, tmp_path / "a")
    with pytest.raises(ThreestepError, match=r"DeepSpeed's state has a torch.Tensor; use"):
        write_state({"a": torch.ones(2).to_sparse()}, tmp_path / "a")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused(tmp_path, zipped):
    torch.save({"module": Marker(tmp_path / "ran")}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    for read in (read_state, plain_checkpoint_engine().load):
        with pytest.raises(ThreestepError, match="a.pt is not a state file written by Threestep"):
            read(tmp_path / "a.pt")
    with plain_torch_files(), pytest.raises(ThreestepError, match="a.pt is not a state file written by Threestep"):
        torch.load(tmp_path / "a.pt", weights_only=False)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "a.pt", weights_only=False)  # as DeepSpeed would
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "state",
    [
        "[",
        '{"tensor": 7}',
        '{"Path": {"a": 1}}',
        '{"dict": 1}',
        '{"dtype": "F3"}',
        "{}",
        "[" * 100_000,
        None,
        9,
        100,
        -1,
    ],
)
def test_other_files_are_refused(tmp_path, state):
    """state: of a safetensors file; or where one of ours is cut off"""
    path = tmp_path / "a.safetensors"
    if isinstance(state, int):
        write_state([torch.ones(100)], path)
        path.write_bytes(path.read_bytes()[:state])
    else:
        save_file({"0": torch.ones(1)}, path, {} if state is None else {"state": state})
    with pytest.raises(ThreestepError, match="a.safetensors is not a state file written by Threestep"):
        read_state(path)


def test_the_names_of_deepspeed(tmp_path):
    """A universal checkpoint has its files under them."""
    keeper = plain_checkpoint_engine()
    keeper.save({"a": 1}, str(tmp_path / "new.pt"))
    write_state({"a": 2}, tmp_path / "old.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.safetensors", "old.pt"]
    assert (keeper.load(str(tmp_path / "new.pt")), keeper.load(str(tmp_path / "old.pt"))) == ({"a": 1}, {"a": 2})
    assert file_of(tmp_path / "none.pt") == tmp_path / "none.safetensors"
    header = (tmp_path / "new.safetensors").read_bytes()[8:]
    assert json.loads(json.loads(header)["__metadata__"]["state"]) == {"dict": [["a", 1]]}
    before = torch.load, torch.save
    with plain_torch_files():
        torch.save(torch.ones(2), tmp_path / "a.pt")
        assert torch.load(tmp_path / "a.pt", map_location="cpu", mmap=True, weights_only=False).tolist() == [1, 1]
    assert (torch.load, torch.save) == before and (tmp_path / "a.pt").read_bytes()[8:9] == b"{"


def test_a_resumed_run_has_the_rates_of_its_own_schedule_at_once(tmp_path):
    def made(steps):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    optimizer, schedule = made(100)
    for _ in range(10):
        optimizer.step()
        schedule.step()
    saved = optimizer.state_dict(), schedule.state_dict()
    optimizer, schedule = made(20)
    (tmp_path / "state").write_text("")

    def load(folder, tag):
        optimizer.load_state_dict(saved[0])
        schedule.load_state_dict(saved[1])

    inner = SimpleNamespace(
        load_universal_checkpoint=lambda: False,
        _get_ckpt_name=lambda *_, **__: str(tmp_path / "state"),
        load_checkpoint=load,
        lr_scheduler=schedule,
    )
    load_engine(inner, tmp_path, "actor")
    assert optimizer.param_groups[0]["lr"] == 0.5 == schedule.get_last_lr()[0]
