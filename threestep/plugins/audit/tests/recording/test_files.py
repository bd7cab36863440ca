"""A record on disk: it comes back as it was, and another form is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from threestep.plugins.audit.recording.files import RecordHead, StepRecord, read_record, write_record
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit


def record(**tensors: np.ndarray) -> StepRecord:
    own = {"lengths": np.array([2, 1]), "logprobs": np.zeros(3, np.float32), "loss_mask": np.zeros(3, bool), **tensors}
    head = RecordHead("sft", 3, 2, {"reduction": "token mean"}, {"loss": 1.5}, {"name": "trl", "version": "1.16.0"})
    return StepRecord(head, [own, own], {"gradients.a.weight": np.ones((2, 2), np.float32)})


def test_a_record_comes_back(tmp_path: Path):
    write_record(tmp_path / "step", record())
    found = read_record(tmp_path / "step")
    assert found.head == record().head
    assert all((found.ranks[1][name] == values).all() for name, values in record().ranks[1].items())
    assert found.state["gradients.a.weight"].shape == (2, 2)
    assert sorted(path.name for path in (tmp_path / "step").iterdir()) == [
        "rank0.safetensors", "rank1.safetensors", "record.json", "state.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"logprob": np.zeros(3, np.float32)}, "has the unknown tensor 'logprob'; did you mean 'logprobs'"),
        ({"logprobs": np.zeros(3, np.int64)}, "expects floating-point numbers in 1 dimension(s) [T], got int64"),
        ({"loss_mask": np.zeros(4, bool)}, "loss_mask expects 3 entries, as logprobs has, got 4"),
        ({"lengths": np.array([2, 2])}, "logprobs expects lengths to add up to its 3 entries, got 4"),
        ({"rollout_values": np.zeros(1, np.float32)}, "expects rollout_lengths to add up to its 1 entries"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused(tmp_path: Path, tensors, words):
    with pytest.raises(ThreestepError) as refusal:
        write_record(tmp_path / "step", record(**tensors))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "expects schema threestep-record, version 1, got schema threestep-record, version 2"),
        ({"objective": "orpo"}, "objective expects one of sft, reward, dpo, policy, got 'orpo'"),
        ({"settings": {"beto": 1}}, "settings has the unknown name 'beto'; did you mean 'beta'"),
        ({"settings": {"beta": "x"}}, "beta expects a number, got 'x'"),
        ({"figures": {"los": 1}}, "figures has the unknown name 'los'; did you mean 'loss'"),
        ({"ranks": 3}, "rank2.safetensors expects the tensors of one rank, and is missing"),
    ],
)
def test_other_heads_are_refused(tmp_path: Path, changes, words):
    write_record(tmp_path, record())
    content = json.loads((tmp_path / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(ThreestepError) as refusal:
        read_record(tmp_path)
    assert words in str(refusal.value)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path):
    write_record(tmp_path, record())
    from safetensors.numpy import save_file

    save_file({"momentum.a": np.zeros(1)}, str(tmp_path / "state.safetensors"))
    with pytest.raises(ThreestepError, match="expects names that begin with gradients"):
        read_record(tmp_path)
    (tmp_path / "rank0.safetensors").write_bytes(b"{}")
    with pytest.raises(ThreestepError, match="expects safetensors"):
        read_record(tmp_path)
