"""The correction of a run's rollouts, where a plugin has one and where none does."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from training.step3_ppo.contracts.records import NO_CORRECTION, Corrected
from training.step3_ppo.flags import rollout_choices
from training.step3_ppo.flags.rollout_choices import correction_of
from training.utils.base.errors import ThreestepError


def test_without_a_plugin_the_newest_weights_have_to_draw(monkeypatch):
    monkeypatch.setattr(rollout_choices, "added", lambda table, known: {})
    assert correction_of(ppo_flags()) is NO_CORRECTION
    monkeypatch.setattr(rollout_choices, "draws_exactly", lambda flags: False)
    with pytest.raises(ThreestepError, match="no plugin that is installed has one; draw by --rollout_engine hf"):
        correction_of(ppo_flags())


def test_two_plugins_that_correct_are_refused(monkeypatch):
    monkeypatch.setattr(rollout_choices, "added", lambda table, known: {"one": "a:b", "two": "c:d"})
    with pytest.raises(ThreestepError, match="corrected once, and --one and --two would each do it"):
        correction_of(ppo_flags())


def test_no_correction_leaves_everything_as_it_is():
    assert NO_CORRECTION.corrected(None, None, None) == Corrected(None, None)  # type: ignore[arg-type]
    assert NO_CORRECTION.loss_weights(None, None) is None  # type: ignore[arg-type]
    assert NO_CORRECTION.measures(None, None, Corrected()) == [] and NO_CORRECTION.figures({"a": 1.0}) == {}  # type: ignore[arg-type]
    assert not NO_CORRECTION.bypasses and not NO_CORRECTION.reads_old_policy
