"""Flags of checkpoints: the path that --resume may do without, mistakes."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.flags.arguments import parse_arguments, words_of
from training.utils.flags.flags import note_mistakes


@pytest.mark.parametrize(
    ("words", "resume"), [([], None), (["--resume"], "latest"), (["--resume", "a/step_000001"], "a/step_000001")]
)
def test_resume_with_and_without_a_path(words, resume):
    (flags,) = parse_arguments([CheckpointArguments], [*words, "--save_every", "5"], "")
    assert (flags.resume, flags.save_every) == (resume, 5)


@pytest.mark.parametrize(
    ("value", "resume"),
    [("true", "latest"), ("True", "latest"), ("yes", "latest"), ("latest", "latest"), ("false", None), ("no", None),
     ("", None), ("null", None), ("a/step_000001", "a/step_000001")],
)  # fmt: skip
def test_resume_in_every_form(value, resume, tmp_path):
    """As YAML and Python write a bare flag, and as other tools' habits write it on a command line."""
    (tmp_path / "run.yaml").write_text(f"resume: {value}\n")
    (flags,) = parse_arguments([CheckpointArguments], ["--config", str(tmp_path / "run.yaml")], "")
    assert flags.resume == resume
    if value not in ("", "null"):
        for words in (["--resume", value], [f"--resume={value}"], words_of("resume", value)):
            (flags,) = parse_arguments([CheckpointArguments], words, "")
            assert flags.resume == resume, words
    if value in ("true", "false"):
        (flags,) = parse_arguments([CheckpointArguments], words_of("resume", value == "true"), "")
        assert flags.resume == resume


def test_mistakes_are_told():
    mistakes = Mistakes()
    note_mistakes(CheckpointArguments(save_every=-1, keep_last=-2), mistakes)
    with pytest.raises(ThreestepError) as told:
        mistakes.raise_if_any()
    for part in (
        "--save_every expects 0 or more, got -1",
        "--keep_last expects 0 or more, got -2",
    ):
        assert part in str(told.value)
