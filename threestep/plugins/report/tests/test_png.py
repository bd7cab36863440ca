"""Pictures on request."""

from __future__ import annotations

import pytest

from threestep.plugins.report.png import write_pngs
from threestep.plugins.report.tests.conftest import write_lines
from training.utils.base.errors import ThreestepError


def test_every_chart_has_a_picture(tmp_path, ppo_run):
    folder = ppo_run("$x_{$")  # no mathematics for matplotlib
    lines = [{"step": step, "rollout/score": score} for step, score in ((1, 0.5), (2, None), (3, 0.7))]
    lines += [{"step": step, "eval/check": 0.5} for step in (0, 3)]  # two values are no curve
    write_lines(folder / "metrics.jsonl", lines)
    paths = list(write_pngs([folder], tmp_path / "pictures"))
    assert [path.name for path in paths] == [
        "ppo_reward.png", "ppo_rewards_of_held_out_prompts.png", "ppo_length_and_reward.png"
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_place_that_cannot_be_written_is_a_mistake(tmp_path, sft_run):
    (tmp_path / "file").write_text("")
    with pytest.raises(ThreestepError, match="cannot write pictures to .*file/x: "):
        list(write_pngs([sft_run()], tmp_path / "file" / "x"))
