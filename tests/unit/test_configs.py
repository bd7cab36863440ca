"""Every step has recipes, which say how they are run; the tests of the plugin `plan` have their sizes."""

from __future__ import annotations

import re

import pytest

from tests.support.recipes import RECIPES, SIZES, TRAINING


def test_every_step_has_a_recipe_of_every_size():
    for step in ("step1_sft", "step2_reward", "step2_dpo", "step3_ppo"):
        assert {path.stem for path in RECIPES if path.parent.parent.name == step} >= set(SIZES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_a_recipe_says_how_it_is_run_and_where_its_numbers_come_from(recipe):
    text = recipe.read_text()
    assert str(recipe.relative_to(TRAINING.parent)) in text
    assert re.search(r"# .*\bet al\. 20\d\d", text)
