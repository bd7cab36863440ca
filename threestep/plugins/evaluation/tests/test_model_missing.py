"""A model folder that is not there is named before anything is loaded."""

from __future__ import annotations

import importlib
import io

import pytest

from training.utils.base.errors import ThreestepError

REWARD = "reward --data_path embedded --model_name_or_path gpt2 --reward_model runs/nosuch"
WIN_RATE = "win_rate --reward embedded --data_path embedded --model_name_or_path gpt2 --baseline runs/nosuch"


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("chat", "gpt2 runs/nosuch"),
        ("chat", "gpt2 --reward_model runs/nosuch"),
        ("evaluate", WIN_RATE),
        ("evaluate", REWARD),
    ],
)
def test_it_is_named(program, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)  # and so for the configuration:
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    monkeypatch.setattr("sys.stdin", io.StringIO("question"))
    with pytest.raises(ThreestepError, match="^the model folder 'runs/nosuch' does not exist, though 'runs' does"):
        importlib.import_module(f"threestep.plugins.evaluation.{program}").main(flags.split())
