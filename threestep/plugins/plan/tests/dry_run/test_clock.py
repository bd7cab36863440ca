"""The clock's device, and what a dry run prints of it."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
import torch

from threestep.plugins.plan.arguments import DryRunArguments
from threestep.plugins.plan.clock.devices import DEVICES
from threestep.plugins.plan.dry_run import cpu_rates, in_a_model
from threestep.plugins.plan.dry_run.clock import clock_device
from threestep.plugins.plan.dry_run.device import planned_device
from training.step1_sft.main import main
from training.step2_dpo.main import main as step2_dpo
from training.utils.base.errors import ThreestepError
from training.utils.models.row_sharing import RowSharing

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


def test_pairs_are_two_sequences(said, tmp_path, capsys):
    """Of the same length and number, pairs take twice the forwards, as a step of DPO does; the optimizer steps once."""
    flags = ("--device", "h100", "--gradient_accumulation_steps", "4")
    text = said(*flags)
    of_pairs = ["--data_path", "embedded", "--model_name_or_path", str(tmp_path), "--dry_run", "true"]
    step2_dpo([*of_pairs, "--max_seq_len", "64", *flags])
    pairs = capsys.readouterr().out

    def seconds(table: str, name: str) -> float:
        return float(re.findall(rf"^  {name} +([\d.]+)$", table, re.M)[-1])

    assert seconds(pairs, "launches by the host") == pytest.approx(2 * seconds(text, "launches by the host"), abs=2e-4)
    assert seconds(pairs, "optimizer") == seconds(text, "optimizer")


def test_a_kind_alone_gives_none(said):
    assert "seconds of one step" not in said("--device", "cuda")


def test_rows_that_ranks_share_have_no_seconds_yet(capsys):
    assert clock_device("h100", "bf16", sharing=RowSharing(2, flag="--ranks_of_a_row")) is None
    assert "not known yet for --ranks_of_a_row 2" in capsys.readouterr().out


@pytest.fixture
def quick(monkeypatch):
    """Rates from a try of next to no time."""
    monkeypatch.setattr(cpu_rates, "_PRODUCTS", {8: (8, 16), 16: (16,)})
    monkeypatch.setattr(cpu_rates, "_NUMBERS", (1000, 8000))
    monkeypatch.setattr(in_a_model, "_TRIES", 1)
    monkeypatch.setattr(cpu_rates, "seconds_of", partial(cpu_rates.seconds_of, tries=1, least=1e-4))


def test_this_cpu_is_measured(said, quick):
    assert "seconds of one step on 1 x this CPU" in said("--device", "cpu")
    device = clock_device("cpu", "fp32")
    assert device is not None and device.measured is not None and device.single > 0 and device.memory_rate > 0
    assert device.measured.optimizer_rate(1e6) > 0 and device.measured.launch_seconds(1e5) > 0 and not device.is_cuda
    assert clock_device("cuda", "fp32") is clock_device(None, "fp32") is None


def test_ranks_share_the_threads(monkeypatch):
    """As a run of two ranks would; the process has its own again afterwards."""
    seen = []
    monkeypatch.setattr(cpu_rates, "_measured", lambda dtype: seen.append(torch.get_num_threads()))
    monkeypatch.setattr("training.utils.engine.ranks.devices.cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    for ranks in (1, 2, 64):
        clock_device("cpu", "fp32", ranks=ranks)
        assert torch.get_num_threads() == before
    monkeypatch.setenv("OMP_NUM_THREADS", str(before))
    cpu_rates.measured_cpu(ranks=3)
    assert seen == [before, 3, 1, before]


def test_a_device_is_read_from_a_file(said, tmp_path):
    (tmp_path / "mine.json").write_text(DEVICES["l40s"].as_json())
    assert clock_device(str(tmp_path / "mine.json"), "bf16") == DEVICES["l40s"]
    assert f"seconds of one step on 1 x {tmp_path / 'mine.json'}" in said("--device", str(tmp_path / "mine.json"))
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "none.json"):
        with pytest.raises(ThreestepError, match=rf"--device \S*{name} expects a file of .*; measure again"):
            clock_device(str(tmp_path / name), "bf16")
    with pytest.raises(ThreestepError, match="--device expects one of cpu, .* got 'h10'; did you mean 'h100'"):
        said("--device", "h10")


def test_memory_is_the_tables_unless_it_is_given():
    assert planned_device(DryRunArguments(True, "rtx4090")).memory_bytes == DEVICES["rtx4090"].memory_gb * 1e9
    assert planned_device(DryRunArguments(True, "h100", 96)).memory_bytes == 96e9


def test_a_price_needs_a_device(said):
    with pytest.raises(ThreestepError, match=r"--price_per_hour 2.5 expects --device with a name .*, got cuda"):
        said("--device", "cuda", "--price_per_hour", "2.5")
