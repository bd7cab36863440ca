"""Flags that do not go with paths, and what steps on them need."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from tests.unit.step3_ppo.flags.test_checks import names_of, why
from threestep.plugins.images.tests.run.test_run_checks import beside_images
from training.step3_ppo.flags.checks import FORWARDS, VALUES
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not support --parallel_thinking, got True; leave"),
        ({"stop": ["x"]}, r"--stop \['x'\] follows a response token by token, and --parallel_thinking draws its paths"),
        ({"bad_words": ["x"]}, r"--bad_words \['x'\] follows a response token by token, and --parallel_thinking draws"),
    ],
)
def test_what_does_not_go_with_paths_side_by_side(given, said):
    with pytest.raises(ThreestepError, match=said):
        names_of(parallel_thinking=True, **given)
    if "rollout_engine" not in given:
        names_of(**given)
        names_of(parallel_thinking=True, parallel_paths=3, max_path_tokens=8)


@pytest.mark.parametrize("name", ["parallel_paths", "max_path_tokens"])
def test_settings_of_paths_without_them(name):
    mistakes = Mistakes()
    note_mistakes(ppo_flags(**{name: 3}).data, mistakes)
    sentence = f"--{name} 3 is for the paths of --parallel_thinking, which is not given; give it, or leave --{name} out"
    assert sentence in mistakes.sentences


def test_prompts_with_images_are_refused():
    with pytest.raises(ThreestepError, match="--parallel_thinking does not go with prompts that have images: it draws"):
        beside_images(parallel_thinking=True)


def test_guesses_are_refused():
    with pytest.raises(ThreestepError, match="draws several tokens at once, and --parallel_thinking draws its paths s"):
        names_of(parallel_thinking=True, speculate="2", speculate_by="ngram")


@pytest.mark.parametrize("name", [FORWARDS, VALUES])
def test_a_forward_of_its_own(name):
    assert (why(name, parallel_thinking=True) or "").startswith("responses have paths side by side")
