"""`--per_device_train_batch_size auto`: the most sequences of a step whose forward fits, the step as large as ever."""

from __future__ import annotations

import json
import re

import pytest

from training.step1_sft.main import main

SHAPE = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             vocab_size=512, max_position_embeddings=128)  # fmt: skip


@pytest.mark.parametrize(("gigabytes", "sequences"), [("80", 48), ("0.02", 16), ("0.0001", 1)])
def test_as_many_sequences_as_fit(tmp_path, capsys, gigabytes, sequences):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    flags = f"--model_name_or_path {tmp_path} --data_path embedded --output_dir {tmp_path}/run --max_seq_len 128"
    flags += f" --device cuda --device_memory_gb {gigabytes} --gradient_accumulation_steps 3 --dry_run true"
    main([*flags.split(), "--per_device_train_batch_size", "auto"])
    text = capsys.readouterr().out
    assert f"auto: --per_device_train_batch_size {sequences} (of a step's 48; a forward may take" in text
    assert f"an optimizer step takes 48 sequences ({sequences} x 1 ranks x {48 // sequences})" in text
    needed, free = re.search(r"may take ([\d.e+-]+) GB of ([\d.e+-]+) that are free", text).groups()
    assert (float(needed) <= 0.9 * float(free)) == (sequences > 1)


@pytest.mark.parametrize(("kind", "tokens"), [("cpu", "2,048"), ("cuda", "3,840")])
def test_forwards_on_a_cpu_are_counted_small(tmp_path, capsys, kind, tokens):
    """30 sequences of 128 tokens are 3,840; 16 of them are 2,048."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    flags = f"--model_name_or_path {tmp_path} --data_path embedded --output_dir {tmp_path}/run --max_seq_len 128"
    main([*flags.split(), "--per_device_train_batch_size", "30", "--device", kind, "--dry_run", "true"])
    assert f"a forward of one rank holds at most {tokens} tokens in packed rows" in capsys.readouterr().out
