"""Steps are found, and a run's settings name theirs."""

from __future__ import annotations

import pytest

from training.utils.flags.arguments import defaults_of
from training.utils.flags.step import UNKNOWN_STEP, known_steps, step_of

STEPS = known_steps()


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_known_by_its_program_and_by_its_flags(name):
    flags = defaults_of(STEPS[name].groups)
    assert step_of(flags) is STEPS[name]
    assert step_of({**flags, "of_an_older_version": 1, "ranks": 2}) is STEPS[name]
    assert step_of({"program": f"training.{name}.main"}) is STEPS[name]
    assert STEPS[name].number == name[4]


@pytest.mark.parametrize("settings", [{}, {"seed": 1, "output_dir": "x"}, {"program": "training.a"}, {"nothing": 2}])
def test_other_settings_have_no_step(settings):
    assert step_of(settings) is UNKNOWN_STEP


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"beta": 0.1}, "dpo"), ({"center_coef": 0.0}, "reward"), ({"actor_model_name_or_path": "x"}, "ppo")],
)
def test_one_flag_of_its_own_is_enough(settings, kind):
    assert step_of(settings).kind == kind


def test_a_variant_takes_the_place_of_the_title():
    ppo = step_of({"ppo_epochs": 1})
    assert [ppo.title_of(settings) for settings in ({}, {"advantage": "gae"}, {"advantage": "rloo"})] == [
        "PPO", "PPO", "RLOO",
    ]  # fmt: skip
    assert step_of({"neftune_alpha": 0.0}).title_of({"advantage": "rloo"}) == "supervised fine-tuning"
