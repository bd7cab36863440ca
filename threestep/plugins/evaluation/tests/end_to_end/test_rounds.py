"""Rounds of best of n and DPO from one file, by the programs themselves: a run that was stopped ends with the weights
of one that was not, and each round starts from the model of the last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_module
from threestep.plugins.programs import all_steps

pytestmark = pytest.mark.timeout(900)  # on a busy machine

SHARED = {
    "data_path": ["embedded"], "data_split": "1,0,1", "max_prompt_seq_len": 32, "max_seq_len": 64, "dtype": "fp32",
    "max_train_rows": 32, "max_eval_rows": 8, "eval_fraction": 0.2,
}  # fmt: skip
VALUES = {
    "seed": 1,
    "rounds": 2,
    "new_model": {
        "vocab_size": 353, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "rope_theta": 100,
    },
    "shared": SHARED,
    "step1_sft": {"per_device_train_batch_size": 16, "learning_rate": 2e-3},
    # Hardly trained, it ends few responses. The length decides: random texts have no right answer.
    "best_of": {
        "reward": "length", "reward_length_characters": 12, "checker": "embedded", "num_samples_per_prompt": 3,
        "max_new_tokens": 6, "keep_cut": True, "per_device_eval_batch_size": 4,
    },
    "step2_dpo": {"learning_rate": 2e-3, "per_device_train_batch_size": 8},
}  # fmt: skip


class Stopped(Exception):
    """Raised in place of a program that is not started."""


@pytest.fixture
def started(monkeypatch):
    """Start the programs by forks; stop before the program with this folder as its last one."""
    stop_before: list[str] = []

    def launched(module: str, words: list[str], ranks: int | None, environment: dict[str, str] | None = None) -> int:
        if stop_before and module == "training.step2_dpo.main" and stop_before[0] in Path(words[1]).read_text():
            raise Stopped
        ran = run_module(module, words, ranks or 1, environment)
        assert ran.code == 0, ran.words
        return ran.code

    monkeypatch.setattr(all_steps, "launch", launched)
    return stop_before


def test_a_run_that_was_stopped_ends_like_one_that_was_not(started, tmp_path, capsys):
    files = {}
    for name in ("whole", "stopped"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps({"output_dir": str(tmp_path / name), **VALUES}))  # JSON is YAML
        if name == "stopped":
            started.append("stopped/rounds/2/step2_dpo")
            with pytest.raises(Stopped):
                all_steps.main(["--config", str(path)])
            started.clear()
            all_steps.main(["--config", str(path), "--resume"])
        else:
            all_steps.main(["--config", str(path)])
        rounds = tmp_path / name / "rounds"
        kept = [path for number in (1, 2) for path in (rounds / f"{number}").rglob("*")]
        files[name] = {
            str(path.relative_to(rounds)): path.read_bytes()
            for path in kept
            if path.name in ("model.safetensors", "rows.jsonl", "answers.jsonl")
        }
    said = capsys.readouterr().out
    assert said.count("finished before") == 6 and "== round 2 of 2, best of n: finished before" in said
    assert len(files["whole"]) == 6 and files["whole"] == files["stopped"]
    one, two = (files["whole"][f"{number}/step2_dpo/model/model.safetensors"] for number in (1, 2))
    assert one != two
    config = (tmp_path / "whole/rounds/2/step2_dpo/config.yaml").read_text()
    assert f"model_name_or_path: {tmp_path}/whole/rounds/1/step2_dpo/model\n" in config
    rows = json.loads((tmp_path / "whole/rounds.json").read_text())["rounds"]
    assert [row["round"] for row in rows] == [0, 1, 2] and all(row["pairs"] > 2 for row in rows[1:])
    assert all({"reward", "reward/length", "reward/embedded"} <= row.keys() for row in rows)
    # Each round answers prompts of its own.
    asked = [
        {json.loads(line)["uid"] for line in files["whole"][f"{number}/best_of/answers.jsonl"].splitlines()}
        for number in (1, 2)
    ]
    assert not asked[0] & asked[1]
