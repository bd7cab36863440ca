"""The console command: its table, what it runs here, what it launches, what lies in the user's folder, and output whose
reader has gone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.support.forked_programs import ROOT
from tests.support.heavy import heavy_modules_after
from threestep import command
from threestep.command import commands
from training import __version__
from training.utils.base.console import COMMAND_VARIABLE
from training.utils.flags.step import known_steps
from training.utils.plugins.plugin import HANDED_ON, LAUNCHED, Command
from training.utils.run import launch


@pytest.fixture
def ran(monkeypatch):
    """What runs here, and what is launched; neither does."""
    calls = []
    for name in ("RANK", "WORLD_SIZE", "THREESTEP_RANKS", "THREESTEP_HOSTFILE", COMMAND_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(launch, "_installed_gpus", lambda: 0)
    monkeypatch.setattr(launch, "_deepspeed_program", lambda: "deepspeed")
    monkeypatch.setattr(launch, "run_and_wait", lambda words, environment, **_: calls.append(("launched", words)) or 3)
    monkeypatch.setattr(command.runpy, "run_module", lambda module, **_: calls.append(("here", module, sys.argv[1:])))
    return calls


def test_every_step_has_a_word():
    steps = {step.kind: step.program for step in known_steps().values()}
    assert {word: command.commands()[word].module for word in steps} == steps


@pytest.mark.parametrize("word", command.commands())
def test_every_word_is_a_program(word):
    program = command.commands()[word]
    assert importlib.util.find_spec(program.module) is not None
    assert (f"\n  {word} " if " " not in word and not program.flags else word) in command.overview()


def test_at_most_fourteen_commands_are_listed():
    assert len([line for line in command.overview().splitlines() if line.startswith("  ")]) <= 14


def test_a_name_of_two_words_and_an_earlier_name(ran, monkeypatch, capsys):
    monkeypatch.setattr(
        command, "added", lambda *_: {"one": Command("m.one", ""), "one two": Command("m.two", "", earlier="two")}
    )
    for words in (["one", "x"], ["one", "two", "x"], ["two", "x"]):
        command.main(words)
    assert ran == [("here", "m.one", ["x"]), ("here", "m.two", ["x"]), ("here", "m.two", ["x"])]
    assert capsys.readouterr().err == "`threestep two` is now `threestep one two`\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_without_a_word_the_commands_are_listed(words, capsys, ran):
    command.main(words)
    assert capsys.readouterr().out.startswith("usage: threestep COMMAND [flags]\n")
    assert ran == []


def test_the_version(capsys):
    command.main(["--version"])
    assert capsys.readouterr().out == f"threestep {__version__}\n"


def test_an_unknown_word_gets_the_right_one(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["sftt", "--out", "x"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == "error: there is no command 'sftt'; did you mean 'sft'?\n"
    with pytest.raises(SystemExit):
        command.main(["train"])
    said = capsys.readouterr().err
    assert said.startswith("error: there is no command 'train'; commands are sft, reward, dpo, ppo, grpo, rloo")
    with pytest.raises(SystemExit):
        command.main(["kto"])
    assert capsys.readouterr().err == "error: there is no command 'kto'; use `threestep dpo --loss_type kto`\n"


def test_one_rank_runs_in_this_process(ran, monkeypatch):
    monkeypatch.setitem(command.CORE_COMMANDS, "alone", Command("training.alone", ""))
    command.main(["sft", "--seed", "3"])
    command.main(["ppo", "--num_ranks", "1"])
    command.main(["alone", "a", "--num_ranks", "2"])  # whose parser knows no such flag
    assert ran == [
        ("here", "training.step1_sft.main", ["--seed", "3"]),
        ("here", "training.step3_ppo.main", []),
        ("here", "training.alone", ["a", "--num_ranks", "2"]),
    ]
    assert os.environ[COMMAND_VARIABLE] == "threestep alone"


@pytest.mark.parametrize(
    "word", [word for word, program in command.commands().items() if program.takes_ranks == "launched"]
)
def test_several_ranks_are_launched_and_their_code_comes_back(word, ran):
    with pytest.raises(SystemExit) as ended:
        command.main([*word.split(), "--seed", "3", "--num_ranks", "2"])
    assert ended.value.code == 3
    ((how, words),) = ran
    assert how == "launched" and words[2:5] == ["--quiet", "--num_accelerators", "2"]
    program = command.commands()[word]
    assert words[words.index(str(ROOT / "training")) :][1:] == [program.module, *program.flags, "--seed", "3"]


def test_a_gpu_each_trains_and_one_evaluates(ran, monkeypatch):
    monkeypatch.setattr(launch, "_installed_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(SystemExit):
        command.main(["dpo"])
    monkeypatch.setitem(command.CORE_COMMANDS, "one", Command("training.one", "", LAUNCHED, ranks=1))
    command.main(["one", "reward"])
    assert [how for how, *_ in ran] == ["launched", "here"]


def test_help_starts_no_ranks(ran):
    command.main(["sft", "--num_ranks", "2", "--help"])
    assert ran == [("here", "training.step1_sft.main", ["--num_ranks", "2", "--help"])]


def test_a_program_that_starts_ranks_itself_gets_their_number(ran, monkeypatch):
    monkeypatch.setitem(command.CORE_COMMANDS, "several", Command("training.several", "", HANDED_ON))
    command.main(["several", "--config", "run.yaml", "--num_ranks", "2"])
    assert ran == [("here", "training.several", ["--config", "run.yaml"])]
    assert os.environ["THREESTEP_RANKS"] == "2"


def test_wrong_ranks_are_one_sentence(ran, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["sft", "--num_ranks", "two"])
    assert ended.value.code == 2 and ran == []
    assert capsys.readouterr().err == "error: THREESTEP_RANKS expects a positive whole number, got 'two'\n"


def test_help_loads_nothing_heavy():
    heavy, _, said = heavy_modules_after(
        """
import sys
from threestep.command import main
try:
    main(["sft", "--help"])
except SystemExit as end:
    assert not end.code, end.code
"""
    )
    assert said.startswith("usage: threestep sft ") and heavy == []


@pytest.mark.parametrize("how", [["-m", "threestep"], [str(ROOT / "threestep")]])
def test_a_training_py_where_one_works_is_nothing_to_the_command(how, tmp_path):
    (tmp_path / "training.py").write_text("raise SystemExit('the one of the current folder')\n")
    shown = subprocess.run(
        [sys.executable, *how, "sft", "--help"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.stdout.startswith("usage: threestep sft "), shown.stderr


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
    code, printed = unread(*command.split(), "--help")
    assert printed == "" and code in (0, 141)  # 0: of steps, whose output may be lost
