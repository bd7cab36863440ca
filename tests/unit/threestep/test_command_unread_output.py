"""Output whose reader has gone: `threestep ... | head`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.forked_programs import ROOT
from threestep.command import commands


def unread(*words: str) -> tuple[int, str]:
    """Exit code and standard error of a command whose output is closed before it writes."""
    command = [sys.executable, str(ROOT / "threestep"), *words]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stderr is not None
    started.stdout.close()
    with started.stderr as stream:
        printed = stream.read()
    return started.wait(60), printed


@pytest.mark.parametrize(("words", "code"), [(["--help"], 141), (["--version"], 141), ([], 141), (["hlep"], 2)])
def test_it_ends_quietly_with_the_shells_code_for_a_closed_pipe(words, code):
    ended, printed = unread(*words)
    assert ended == code and "Traceback" not in printed and "BrokenPipe" not in printed


@pytest.mark.parametrize("command", commands())
def test_the_help_of_every_command_does(command):
    code, printed = unread(command, "--help")
    assert printed == "" and code in (0, 141)  # 0: of steps, whose output may be lost
