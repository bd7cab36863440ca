"""Refusals of a step before it looks for the model. One case is of a head too."""

from __future__ import annotations

import importlib.util

import pytest

import threestep.plugins.mtp  # noqa: F401 (its flag is in a case)
from training.step1_sft.main import main
from training.utils.base.errors import ThreestepError

ROUNDED = "--model_name_or_path no/model --data_path embedded --lora_dim 4 --load_in_"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "8bit --zero_stage 3",
            "8bit cannot go with --zero_stage 3, as rounded weights are whole on every rank; leave",
        ),
        ("8bit --mtp_num_layers 1", "8bit cannot go with --mtp_num_layers 1, whose head starts as a layer of exact we"),
        ("4bit", "4bit needs the package bitsandbytes, which is not installed; run: pip install bitsandbytes, or give"),
    ],
)
def test_what_rounded_weights_cannot_go_with(monkeypatch, flags, sentence):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    with pytest.raises(ThreestepError, match=f"--load_in_{sentence}"):
        main(f"{ROUNDED}{flags}".split())
