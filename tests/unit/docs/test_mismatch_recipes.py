"""The recipes: the page lists them as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.step3_ppo.mismatch import RECIPES

PAGE = Path(__file__).parents[3] / "docs" / "mismatch.md"


def spelt(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_the_recipe(name):
    recipe = RECIPES[name]
    flags = ", ".join(f"`{flag} {spelt(value)}`" for flag, value in recipe.flags.items())
    assert f"| `{name}` | {flags} | {recipe.when} |" in PAGE.read_text(encoding="utf-8").splitlines()
