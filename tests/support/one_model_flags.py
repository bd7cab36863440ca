"""The flags of a step that trains one model, as its program parses them."""

from __future__ import annotations

from training.utils.flags.arguments import parse_arguments
from training.utils.flags.step import Step
from training.utils.setup.flags import OneModelFlags


def one_model_flags(step: Step, words: str) -> OneModelFlags:
    """words: a command line, without what every run needs."""
    needed = "--model_name_or_path m --data_path embedded --output_dir o".split()
    return OneModelFlags(step, *parse_arguments(step.groups, [*needed, *words.split()], ""))
