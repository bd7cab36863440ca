"""The program: the words before its flags, its refusals, and its exit codes."""

from __future__ import annotations

import json

import pytest

from threestep.plugins.environments import __main__ as program
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit


def test_words_before_the_flags_are_the_task_and_its_environments():
    assert program.with_flags(["check", "a.py:B", "c.py:D", "--json"]) == [
        "--task", "check", "--environment", "a.py:B,c.py:D", "--json",
    ]  # fmt: skip
    assert program.with_flags(["list", "a", "b"]) == ["--task", "list", "--places", "a", "b"]
    assert program.with_flags(["--help"]) == ["--help"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["chek"], "expects one of list, try, check first, got 'chek'; did you mean 'check'"),
        (["try"], "expects an environment, FILE.py:NAME or the name of an installed one, got none"),
        (["check", "a"], "or the name of an installed environment, which are none, got 'a'"),
        (["check", "FILE:Sound", "--by_hand"], "--by_hand is for `try`, and this is check"),
        (["try", "FILE:Sound", "--by_hand"], "--by_hand needs --model_name_or_path, got none"),
        (["try", "FILE:Sound", "--html", "a.html"], "--html is for `check`, and this is try"),
        (["check", "FILE:Sound", "--reward_range", "1", "0"], "--reward_range expects two numbers"),
        (["check", "FILE:Sound", "--row", '{"environment": ""}'], "no environment answers a row"),
        (["try", "FILE:Sound", "--row", '{"environment": ""}'], "nobody answers it; give another --row"),
    ],
)
def test_mistakes(words, sentence, environment_file):
    with pytest.raises(ThreestepError) as mistake:
        program.main([word.replace("FILE", str(environment_file)) for word in words])
    assert sentence in str(mistake.value)


def test_a_check_prints_writes_and_exits(environment_file, tmp_path, capsys):
    row = json.dumps({"ground_truth": "thirty"})
    page = tmp_path / "page.html"
    program.main(["check", f"{environment_file}:Sound", "--row", row, "--json", "--html", str(page)])
    assert json.loads(capsys.readouterr().out)["is_good"]
    assert "nothing wrong was found" in page.read_text()
    with pytest.raises(SystemExit) as code:
        program.main(["check", f"{environment_file}:Leaky", "--row", row])
    assert code.value.code == program.WRONG_EXIT_CODE
    assert "leaks" in capsys.readouterr().out.splitlines()[0]


def test_a_try_reads_lines_and_may_be_left(environment_file, monkeypatch, capsys):
    lines = iter(["no", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    program.main(["try", f"{environment_file}:Sound", "--row", '{"ground_truth": "a"}'])
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["user> Say it.", "user> no, 2 left"]
    assert "left before the conversation was over" in printed.err


def test_tools_are_played_too(tmp_path, capsys, monkeypatch):
    docstring = '    """Add.\n\n    Args:\n        a: A.\n        b: B.\n    """\n'
    (tmp_path / "tool.py").write_text(f"def add(a: int, b: int) -> int:\n{docstring}    return a + b\n")
    lines = iter(["[add(a=1, b=2)]", "3"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    program.main(["try", "--tools", f"{tmp_path}/tool.py:add", "--row", '{"prompt": "1 and 2?"}'])
    assert capsys.readouterr().out.splitlines()[:3] == ["user> 1 and 2?", "tools: add(a, b)", "tool add> 3"]
