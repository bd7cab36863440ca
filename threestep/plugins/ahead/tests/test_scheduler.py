"""Flags that do not go with --rollouts_ahead are refused, each by a sentence."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.ahead.arguments import AheadArguments
from threestep.plugins.ahead.scheduler import rollout_scheduler
from threestep.plugins.images.models.pictured import RowImages
from training.step3_ppo.flags.algorithm import experience_settings
from training.step3_ppo.flags.checks import checked_components
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout


def flags_of(**given):
    names = {"actor_model_name_or_path": "a", "reward": "gsm8k", "num_samples_per_prompt": 2, "advantage": "grpo"}
    return ppo_flags(**{**names, "rollouts_ahead": 1, **given})


def settings_of(**given):
    flags = flags_of(**given)
    return experience_settings(checked_components(flags).algorithm, flags.ppo, SequenceLayout(PlanSettings(1), 1))


def test_older_weights_are_corrected_unless_that_is_refused():
    ahead = settings_of()
    assert ahead.correction.settings.correction == "truncate" and ahead.reading.reads_old_logprobs
    assert not settings_of(mismatch_correction="none").correction.settings.acts
    assert not settings_of(rollouts_ahead=0).correction.settings.acts


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dynamic_sampling_tries": 2}, "--dynamic_sampling_tries 2 draws other prompts once a step sees the scores"),
        ({"prompt_sampler": "a.py:B"}, "--prompt_sampler chooses prompts by the scores of the step before"),
        ({"prompt_dataset": "a.py:B"}, "--prompt_dataset chooses prompts by the scores of the step before"),
        ({"advantage": "remax"}, "--advantage remax draws greedy responses by the newest weights"),
        ({"advantage": "optimal_token_baseline"}, "--advantage optimal_token_baseline reads the distributions of"),
        ({"report_variance": True}, "--report_variance reads the distributions of the policy that drew, whose weights"),
        ({"speculate": "1", "mtp_num_layers": 1}, "--speculate 1 guesses by what is trained meanwhile; leave one of"),
        ({"val_only": True}, "--val_only trains nothing to be ahead of; leave one of them out"),
    ],
)
def test_what_it_does_not_go_with(given, why):
    wanted = f"--rollouts_ahead 1 draws responses before the step that takes them, and {why}"
    with pytest.raises(ThreestepError, match=wanted):
        checked_components(flags_of(**given))
    checked_components(flags_of(**{**given, "rollouts_ahead": 0}))


def test_engines_in_the_processes_of_training_do_not_draw_beside_it():
    wanted = "--rollout_engine hybrid does not support --rollouts_ahead, got 1; leave it out or use another engine"
    with pytest.raises(ThreestepError, match=wanted):
        checked_components(flags_of(rollout_engine="hybrid"))


def check_ahead_of_run(flags, engine, media, *, rollouts, ranks):
    scheduler = rollout_scheduler(flags)
    if scheduler is not None:
        scheduler.check_run(engine, media, rollouts=rollouts, prompts_of_step=4, ranks=ranks)


class Sent(TransformersRollout):
    takes_weights = True


class Met(Sent):
    meets_other_ranks = True


def test_runs_that_cannot_be_ahead():
    flags = flags_of()
    check_ahead_of_run(flags, TransformersRollout, None, rollouts=2, ranks=2)
    check_ahead_of_run(flags_of(rollouts_ahead=0), Sent, None, rollouts=1, ranks=2)
    with pytest.raises(ThreestepError, match="--rollouts_ahead 1 expects a run of more rollouts than that, got 1: all"):
        check_ahead_of_run(flags, TransformersRollout, None, rollouts=1, ranks=1)
    images = object.__new__(RowImages)
    with pytest.raises(ThreestepError, match="--rollouts_ahead 1 does not go with prompts that have images: their"):
        check_ahead_of_run(flags, TransformersRollout, images, rollouts=2, ranks=1)
    with pytest.raises(ThreestepError, match="--rollouts_ahead 1 sends kept weights to --rollout_engine hf from the"):
        check_ahead_of_run(flags, Sent, None, rollouts=2, ranks=2)
    check_ahead_of_run(flags, Sent, None, rollouts=2, ranks=1)
    check_ahead_of_run(flags, Met, None, rollouts=2, ranks=2)


def test_free_has_settings_of_its_own():
    assert flags_of(rollouts_ahead="free").added.of(AheadArguments).steps_ahead == 2
    assert flags_of(rollouts_ahead="free", max_rollout_age=5).added.of(AheadArguments).steps_ahead == 5
    assert settings_of(rollouts_ahead="free").correction.settings.correction == "truncate"
    check_ahead_of_run(flags_of(rollouts_ahead="free"), TransformersRollout, None, rollouts=1, ranks=2)
    check_ahead_of_run(flags_of(rollouts_ahead="free"), Sent, None, rollouts=2, ranks=1)
    check_ahead_of_run(flags_of(rollouts_ahead="free"), Met, None, rollouts=2, ranks=2)
    with pytest.raises(ThreestepError, match="--rollouts_ahead free sends kept weights to --rollout_engine hf"):
        check_ahead_of_run(flags_of(rollouts_ahead="free"), Sent, None, rollouts=2, ranks=2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rollouts_ahead": "soon"}, "--rollouts_ahead expects a number of steps, 0 or more, or free, got 'soon'"),
        ({"max_rollout_age": 3}, "--max_rollout_age 3 is for --rollouts_ahead free, got --rollouts_ahead 1; leave one"),
        ({"replay_schedule": "a"}, "--replay_schedule a is for --rollouts_ahead free, got --rollouts_ahead 1; leave"),
    ],
)
def test_flags_of_free_and_of_no_other(given, why):
    mistakes = Mistakes()
    flags_of(**given).added.of(AheadArguments).validate(mistakes)
    with pytest.raises(ThreestepError, match=why):
        mistakes.raise_if_any()


def test_groups_that_end_in_any_order_have_no_numbers(tmp_path):
    with pytest.raises(ThreestepError, match="--rollout_dump numbers rollouts in the order in which they are drawn"):
        checked_components(flags_of(rollouts_ahead="free", rollout_dump=str(tmp_path)))
