"""The clock's device, and what a dry run prints of it."""

from __future__ import annotations

import json

import pytest

from training.step1_sft.main import main
from training.utils.base.errors import ThreestepError
from training.utils.clock.devices import DEVICES
from training.utils.dry_run.clock import clock_device
from training.utils.dry_run.device import planned_device

SHAPE = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
             vocab_size=512, max_position_embeddings=128)  # fmt: skip


@pytest.fixture
def said(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))

    def run(*flags: str) -> str:
        of_run = ["--data_path", "embedded", "--model_name_or_path", str(tmp_path), "--dry_run", "true"]
        assert main([*of_run, "--max_seq_len", "64", *flags]) is None
        return capsys.readouterr().out

    return run


def test_a_name_gives_seconds_hours_and_money(said):
    text = said("--device", "h100", "--num_ranks", "64", "--price_per_hour", "2.5", "--max_train_steps", "1000")
    assert "seconds of one step on 64 x h100" in text and "launches by the host" in text and "traffic" in text
    assert "1,000 steps: " in text and "in money at 2.5 an hour and rank" in text and "error: " in text
    assert "this fits a GPU of 80 GB" in text


def test_a_kind_alone_gives_none(said):
    assert "seconds of one step" not in said("--device", "cuda")


def test_rows_that_ranks_share_have_no_seconds_yet(capsys):
    assert clock_device("h100", "bf16", sharing=2) is None
    assert "not known yet for --sequence_parallel_size 2" in capsys.readouterr().out


def test_this_cpu_is_measured(said):
    assert "seconds of one step on 1 x this CPU" in said("--device", "cpu")
    device = clock_device("cpu", "fp32")
    assert device is not None and device.single > 0 and device.memory_rate > 0
    assert clock_device("cuda", "fp32") is clock_device(None, "fp32") is None


def test_memory_is_the_tables_unless_it_is_given():
    assert planned_device("rtx4090", None).memory_bytes == DEVICES["rtx4090"].memory_gb * 1e9
    assert planned_device("h100", 96).memory_bytes == 96e9


def test_a_price_needs_a_device(said):
    with pytest.raises(ThreestepError, match=r"--price_per_hour 2.5 expects --device with a name .*, got cuda"):
        said("--device", "cuda", "--price_per_hour", "2.5")
