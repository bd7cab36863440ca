"""The program on a tiny shape: its file is taken by the step's own dry run."""

from __future__ import annotations

import importlib
import json

import pytest

from threestep.plugins.plan.__main__ import FILE, main
from training.utils.base.errors import ThreestepError
from training.utils.flags.step import known_steps

SHAPE = dict(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
             vocab_size=512, max_position_embeddings=128)  # fmt: skip
FEW = ["--max_prompt_seq_len", "32", "--max_answer_seq_len", "32", "--sequences_per_step", "4"]


@pytest.mark.parametrize("task", ["sft", "ppo"])
def test_the_file_is_taken_by_the_steps_dry_run(tmp_path, capsys, task):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    place = tmp_path / "plan"
    main(["--model", str(tmp_path), "--task", task, "--gpus", "2xh100", "--output_dir", str(place), "--curve", "false",
          "--price_per_hour", "2.5", *FEW])  # fmt: skip
    said = capsys.readouterr().out
    assert f"{task} of {tmp_path} on 2 x h100, 4 sequences of 64 tokens" in said and "\n3. " in said
    seconds = float(said.split("1. ZeRO")[1].split(" s a ")[0].split()[-1])
    program = importlib.import_module(next(step.program for step in known_steps().values() if step.kind == task))
    program.main(["--config", str(place / FILE), "--dry_run", "true", "--device", "h100", "--num_ranks", "2"])
    said = capsys.readouterr().out
    unit = "rollout" if task == "ppo" else "step"
    assert float(said.split(f"  one {unit}")[1].split()[0]) == pytest.approx(seconds, abs=1e-3)


def test_nothing_that_fits_is_one_sentence(tmp_path):
    with pytest.raises(ThreestepError, match="nothing fits 1 x rtx4090: the closest .* too few; give more --gpus"):
        main(["--model", "8B", "--gpus", "1xrtx4090", "--output_dir", str(tmp_path), "--curve", "false",
              "--sequences_per_step", "1", "--host_memory_gb", "8"])  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--model expects a folder with a config.json or a size such as 70B, got nothing"),
        (["--model", "8B", "--gpus", "h100"], "--gpus expects a number, x and a name, such as 32xh100, got 'h100'"),
        *(
            (["--model", "8B", "--gpus", number + "xh100"], "--gpus expects a number, x and a name")
            for number in ("²", "٣", "0", "1" + 30 * "0", 5000 * "9")
        ),
        (["--model", "8B", "--host_memory_gb", "inf"], "--host_memory_gb expects .*, got inf"),
        (["--model", "8B", "--gpus", "8xh10"], "got '8xh10'; names are h100, .*; did you mean 'h100'"),
    ],
)
def test_mistakes(words, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        main(words)
