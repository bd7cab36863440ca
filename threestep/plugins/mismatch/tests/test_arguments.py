"""The flags of the correction, checked before anything loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from threestep.plugins.mismatch.arguments import MismatchArguments
from threestep.plugins.mismatch.recipes import RECIPES, REJECTIONS
from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes

PAGE = Path(__file__).parents[1] / "README.md"


def mistakes_of(arguments: MismatchArguments) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(arguments, mistakes)
    return mistakes.sentences


def test_the_defaults_are_sound_and_do_nothing():
    assert mistakes_of(MismatchArguments()) == []
    assert not MismatchArguments().chosen(is_exact=True).acts and MismatchArguments().chosen(is_exact=False).acts


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"mismatch_veto": 1.0},
            "--mismatch_veto expects more than 0 and less than 1, got 1.0",
        ),
        (
            {"mismatch_rejection": ["token_k4:1"]},
            "--mismatch_rejection expects KIND:UPPER or, for k1, KIND:LOWER:UPPER, such as seq_mean_k1:0.999:1.001 or "
            f"token_k3:0.01, KIND one of {', '.join(REJECTIONS)}, got 'token_k4:1'; name one of them",
        ),
        (
            {"mismatch_rejected": "leave"},
            "--mismatch_rejected leave is for what --mismatch_rejection or --mismatch_veto reject, and neither is "
            "given; give one, or leave it out",
        ),
        (
            {"mismatch_recipe": "bypass_pg_is", "mismatch_normalize": True},
            "--mismatch_normalize counts over the whole optimizer step before it begins, and --mismatch_bypass weighs "
            "and rejects within each micro-batch; leave one of them out",
        ),
        (
            {"mismatch_bypass": True, "mismatch_veto": 0.1, "mismatch_rejected": "leave"},
            "--mismatch_rejected leave counts over the whole optimizer step before it begins, and --mismatch_bypass "
            "weighs and rejects within each micro-batch; leave one of them out",
        ),
        ({"mismatch_threshold": 1.0}, "--mismatch_threshold expects more than 1, got 1.0"),
        (
            {"mismatch_correction": "clip"},
            "--mismatch_correction expects one of none, truncate, mask, got 'clip'",
        ),
        ({"mismatch_level": "row"}, "--mismatch_level expects one of token, sequence, geometric, got 'row'"),
    ],
)
def test_mistakes(given, sentence):
    assert mistakes_of(MismatchArguments(**given)) == [sentence]


def spelt(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_the_recipe(name):
    recipe = RECIPES[name]
    flags = ", ".join(f"`{flag} {spelt(value)}`" for flag, value in recipe.flags.items())
    assert f"| `{name}` | {flags} | {recipe.when} |" in PAGE.read_text(encoding="utf-8").splitlines()
