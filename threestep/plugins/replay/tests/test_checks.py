"""Settings that do not go with rollouts in a folder."""

from __future__ import annotations

import pytest

from tests.unit.step3_ppo.flags.test_checks import names_of
from threestep.plugins.replay import checks
from training.utils.base.errors import ThreestepError


@pytest.mark.parametrize("given", [{"load_best_model_at_end": True}, {"early_stopping": 2}])
def test_a_replay_judges_no_evaluation_of_another_run(given, monkeypatch):
    names_of(**given)
    [name] = given
    with pytest.raises(ThreestepError, match=f"--{name} goes by evaluations, and --rollout_replay has another run's"):
        names_of(**given, rollout_replay="there")
    monkeypatch.setattr(checks, "figures_of_others", lambda settings: True)
    names_of(**given, rollout_replay="there")


def test_rollouts_are_not_written_among_those_of_another_run(tmp_path):
    folder = str(tmp_path)
    names_of(rollout_dump=folder)
    (tmp_path / "rollout_000000_rank0.safetensors").touch()
    names_of()
    names_of(resume="latest", rollout_dump=folder)
    with pytest.raises(ThreestepError) as told:
        names_of(rollout_dump=folder)
    assert str(told.value) == (
        f"--rollout_dump expects a folder without rollouts, and {folder} has some; name another, or continue the run "
        "that wrote them by --resume"
    )


def test_a_replay_is_no_evaluation(tmp_path):
    with pytest.raises(ThreestepError, match="^--val_only evaluates, and --rollout_replay "):
        names_of(val_only=True, rollout_replay=str(tmp_path))
