"""What a dry run finds, and counts that are kept."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from threestep.plugins.plan.dry_run.estimate import Estimate, ModelCounts, kept_counts
from threestep.plugins.plan.dry_run.steps import estimated
from training.step1_sft.main import main
from training.utils.base.machine import MemoryLine, Moment, PlannedDevice
from training.utils.models.settings import ModelSettings

SHAPE = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
             vocab_size=512, max_position_embeddings=128)  # fmt: skip


def test_the_most_is_of_one_moment_and_any_can_be_left_out():
    moments = [Moment("rolling out", (MemoryLine("", 7),)), Moment("in a backward", (MemoryLine("", 5, 2),))]
    found = Estimate([], [MemoryLine("", 100, 10)], moments, PlannedDevice(True), lambda: None, None)
    assert (found.most().device_bytes, found.most().host_bytes) == (107, 12)
    assert found.most(without="rolling out").device_bytes == 105


def test_kept_counts_estimate_the_same_and_build_a_model_once(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    kept, settings = kept_counts(), ModelSettings(str(tmp_path))
    recomputing = replace(settings, gradient_checkpointing=True)
    assert kept.model(settings, torch.bfloat16) is kept.model(recomputing, torch.bfloat16)
    words = ["--data_path", "embedded", "--model_name_or_path", str(tmp_path), "--max_seq_len", "64"]
    words += ["--dry_run", "true", "--device", "h100", "--gradient_checkpointing"]
    for recomputes in ("false", "true", "false"):
        anew, again = (estimated(main.checked([*words, recomputes]), counts) for counts in (ModelCounts(), kept))
        assert anew.most() == again.most() and anew.parts() == again.parts()
    assert "GiB" not in capsys.readouterr().out
