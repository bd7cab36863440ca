"""The documentation's blocks of Python and data are run and read, not only compiled.

docs/data.md runs as a whole in tests/end_to_end/test_followed_pages.py; blocks of bash are parsed by the
programs that they call (test_docs.py).
"""

from __future__ import annotations

import csv
import json

import pytest

from tests.support import pages
from tests.support.pages import HISTORY, page_name
from threestep.plugins.inspect import __main__ as inspect
from threestep.plugins.programs import new_model
from training.utils.data import registry

RUN_ELSEWHERE = {
    ("docs/data.md", "my_dataset.py"),
    ("docs/add_a_step.md", "__init__.py"),  # tests/end_to_end/test_add_a_step.py
    ("docs/add_a_step.md", "main.py"),
    *(("docs/write_a_plugin.md", f"{name}.py") for name in ("__init__", "engine", "loss", "tracker", "command")),
    ("docs/after_training.md", "answer.py"),  # threestep/plugins/serve/tests/end_to_end/test_serve.py
    ("threestep/plugins/serve/README.md", "ask.py"),
}
BLOCKS = [
    (page_name(path), block)
    for path in pages.all_pages()
    if page_name(path) not in HISTORY
    for block in pages.blocks(path.read_text())
]


def of_language(*languages):
    return [
        pytest.param(name, block, id=f"{name}:{block.line}")
        for name, block in BLOCKS
        if block.language in languages and (name, block.label) not in RUN_ELSEWHERE
    ]


@pytest.mark.parametrize(("page", "block"), of_language("python"))
def test_python_runs(page, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registry.registered_names()
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    space = {"__name__": "block"}
    exec(compile(block.content, f"{page}:{block.line}", "exec"), space)
    if "my_reward" in space:  # a page's reward function, called as step 3 calls it
        words = dict(ground_truth=["4", "5"], data_source=["a", "a"], level=[1, 2], extra_info=[None, None])
        got = space["my_reward"](["2 + 2", "2 + 2"], ["4", "4"], **words)
        assert (got[0] if isinstance(got, tuple) else got) == [1.0, 0.0]


@pytest.mark.parametrize(("page", "block"), of_language("json", "csv"))
def test_data_reads(page, block):
    if block.language == "json":
        assert all(isinstance(json.loads(line), dict) for line in block.content.splitlines())
    else:
        head, *rows = csv.reader(block.content.splitlines())
        assert rows and all(len(row) == len(head) for row in rows)


def test_your_own_data_begin(tmp_path, monkeypatch, capsys):
    """The dataset of docs/start.md: the file is made as the page says, a model from it, and its rows are shown. The
    commands are the page's; the steps and the chat behind them are parsed by test_docs.py."""
    found = [block for name, block in BLOCKS if name == "docs/start.md"]
    sample, maker = (next(block for block in found if block.label == name) for name in ("pairs.csv", "make_pairs.py"))
    commands = next(block for block in found if block.language == "bash" and "make_pairs.py" in block.content)
    monkeypatch.chdir(tmp_path)
    exec(compile(maker.content, "make_pairs.py", "exec"), {})
    head, *rows = (tmp_path / "pairs.csv").read_text().splitlines()
    assert head == sample.content.splitlines()[0] and len(rows) == 600
    without_digits = str.maketrans("", "", "0123456789")  # the sample is a row of the maker's, with other numbers
    assert sample.content.splitlines()[1].translate(without_digits) == rows[0].translate(without_digits)
    calls = pages.calls(commands.content, tmp_path)
    run = {words[1]: words[2:] for words in calls if words[0] == "threestep"}
    new_model.main(run["new-model"])
    assert (tmp_path / "runs" / "tiny" / "config.json").is_file()
    monkeypatch.setenv("NO_COLOR", "1")
    inspect.main(run["inspect"])
    assert "What is" in capsys.readouterr().out
