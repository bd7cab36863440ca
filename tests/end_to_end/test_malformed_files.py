"""Malformed files before every command that reads some: a sentence and code 2, or what is left of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import malformed_files

pytestmark = pytest.mark.timeout(1800)  # on a busy machine


def _wrong(folder: Path, kinds: list[str], cases: int) -> list[str]:
    malformed_files.make_runs(folder, kinds)
    commands = malformed_files.commands_of(folder, kinds)
    found = malformed_files.cases_of(folder, commands, cases, seed=57)
    return [f"{case.words}: {case.problem}\n{case.found.said[-1000:]}" for case in found if case.problem]


def test_a_sample_of_malformed_files_ends_no_command_with_a_traceback(tmp_path: Path):
    wrong = _wrong(tmp_path, ["sft"], 40)
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_a_thousand_malformed_files_end_no_command_with_a_traceback(tmp_path: Path):
    wrong = _wrong(tmp_path, [*malformed_files.STEPS], 1000)
    assert not wrong, "\n".join(wrong)


def test_a_crash_and_a_silent_success_are_found(tmp_path: Path):
    """The judge of the other tests."""
    path = tmp_path / "rows.json"
    path.write_text('{"a": 1}')
    crashes = malformed_files.ReadingCommand("crashes", [path], lambda: {}["a"])
    silent = malformed_files.ReadingCommand("silent", [path], lambda: None)
    assert malformed_files.problem_of(crashes, malformed_files.outcome(crashes.call), False) == "crash"
    found = malformed_files.outcome(silent.call)
    assert malformed_files.problem_of(silent, found, True) == "ends as if nothing was wrong"
    assert malformed_files.problem_of(silent, found, False) == ""
