"""Steps are found, and a run's settings name theirs."""

from __future__ import annotations

import pytest

from training.utils.flags.arguments import defaults_of, parse_arguments, resolved_settings
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


@pytest.mark.needs_plugin("sft_losses")
def test_a_variant_takes_the_place_of_the_title():
    ppo = step_of({"ppo_epochs": 1})
    assert [ppo.title_of(settings) for settings in ({}, {"advantage": "gae"}, {"advantage": "rloo"})] == [
        "PPO", "PPO", "RLOO",
    ]  # fmt: skip
    assert step_of({"neftune_alpha": 0.0}).title_of({"advantage": "rloo"}) == "supervised fine-tuning"


@pytest.mark.needs_plugin("embedded")
@pytest.mark.parametrize("name", STEPS)
def test_flags_of_other_steps_are_set_aside(name, tmp_path, capsys):
    """A file of settings that all steps share, and each flag of it on the command line."""
    step, (model,) = STEPS[name], [flag for flag in STEPS[name].inputs][:1]
    assert step.unread and step.unread == tuple(dict.fromkeys(step.unread))
    assert not step.defaults.keys() & set(step.unread) and step.may_change >= set(step.unread)
    assert all(any(flag in other.defaults for other in STEPS.values()) for flag in step.unread)
    words = [f"--{model}", "m", "--data_path", "embedded", "--output_dir", "out"]
    words += ["--critic_model_name_or_path", "c"] if name == "step3_ppo" else []
    plain = resolved_settings(parse_arguments(step.groups, words, "", step.old_flags, unread=step.set_aside))
    capsys.readouterr()
    shared = tmp_path / "shared.yaml"
    shared.write_text("".join(f"{flag}: 7\n" for flag in step.unread))
    for given in (["--config", str(shared)], [word for flag in step.unread for word in (f"--{flag}", "7")]):
        found = resolved_settings(
            parse_arguments(step.groups, [*given, *words], "", step.old_flags, unread=step.set_aside)
        )
        assert found == plain
        flags = ", ".join(f"--{flag}" for flag in step.unread)
        assert capsys.readouterr().out == f"set aside, as this step does not read them: {flags}\n"
