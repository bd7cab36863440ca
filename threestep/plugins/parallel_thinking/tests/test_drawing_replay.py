"""Dumped rollouts with paths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from threestep.plugins.parallel_thinking.form import ParallelPaths
from threestep.plugins.parallel_thinking.layout import ParallelTags, PathSampling
from threestep.plugins.replay.files import DumpingRollout, ReplayRollout
from threestep.plugins.replay.tests.test_files import PLAIN, asked, assert_same, model  # noqa: F401
from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.hf import TransformersRollout

pytestmark = pytest.mark.unit


def test_paths_come_back_with_what_was_inserted_and_to_the_same_settings_alone(tmp_path, model):  # noqa: F811
    how = replace(PLAIN, form=ParallelPaths(PathSampling(ParallelTags(3, 4, 5, 6), 2)))
    asked(DumpingRollout(TransformersRollout(), tmp_path, 0), model, how, samples=20)
    expected = asked(TransformersRollout(), model, how, samples=20)
    assert expected.inserted_BR is not None and expected.formed.positions_B is not None
    assert_same(asked(ReplayRollout(tmp_path, 0), None, how, samples=20), expected)
    for other in (replace(how, form=None), replace(how, form=ParallelPaths(PathSampling(ParallelTags(3, 4, 5, 6), 3)))):
        with pytest.raises(ThreestepError, match="was drawn with paths = .*; replay with the settings of the run that"):
            asked(ReplayRollout(tmp_path, 0), None, other, samples=20)
