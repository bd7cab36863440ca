"""The check of an environment, one conversation in the terminal, and the program around both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.chat_templates import chat_tokenizer
from threestep.plugins.environments import __main__ as program
from threestep.plugins.environments.acting import ActingSettings, acting_engine
from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.conversation_arguments import ConversationArguments
from threestep.plugins.environments.conversations import SCRIPTS
from threestep.plugins.environments.findings import GOOD, UNDECIDED, WRONG, Check, check
from threestep.plugins.environments.interface import Call
from threestep.plugins.environments.playing import (
    HandEngine,
    any_form,
    hand_sampling,
    play,
    play_by_hand,
    request_of,
    token_lines,
)
from threestep.plugins.environments.rows import whole_row
from threestep.plugins.environments.text import as_json, as_lines, page
from training.utils.base.errors import ThreestepError
from training.utils.data.rows.arguments import CHAT_TEMPLATE, ChatArguments

ROW = whole_row({"ground_truth": "thirty-seven", "prompt": "What?"})


@pytest.fixture
def checked(load):
    """The check of a class of the file."""

    def made(name, row=ROW, **given):
        return check(load(name), Check([row], seed=1, turns=given.pop("turns", 4), **given))

    return made


def states(found):
    return {finding.name: finding.state for finding in found.findings}


def test_nothing_is_wrong_with_a_sound_one(checked):
    found = checked("Sound", reward_range=(-0.31, 1.0))
    assert set(states(found).values()) == {GOOD}
    assert found.is_good
    by_script = {each.script: each for each in found.scripts}
    assert by_script["nothing"].turns == (3, 3)
    assert by_script["nothing"].rewards == pytest.approx((-0.3, -0.3))
    assert by_script["the answer"].rewards == (1.0, 1.0)
    assert "a call with odd arguments" not in by_script  # it has no tools


def test_calls_are_of_environments_with_tools(checked):
    found = checked("Tooled", reward_range=(-1, 1))
    assert {each.script for each in found.scripts} == set(SCRIPTS)
    assert states(found)["nonsense"] == GOOD
    told = [reply.messages[0]["content"] for reply in found.example[1].replies]
    assert set(told) == {"1 calls"}  # the longest conversation is one of calls


@pytest.mark.parametrize(
    ("name", "question", "words"),
    [
        ("Greets", "beginning", "begins differently with another seed"),
        ("Moody", "repeats", "the second time"),
        ("Shared", "apart", "beside others"),
        ("Fragile", "nonsense", "fails at 'a very long text': environment 'Fragile': step raised OverflowError"),
        ("Generous", "pay for nonsense", "the reward for the ground truth is 1"),
        ("Leaky", "leaks", "in a reply to"),
        ("Told", "leaks", "the opening"),
        ("Unready", "reset", "reset raised KeyError"),
    ],
)
def test_each_fault_is_found(checked, name, question, words):
    found = checked(name)
    if name == "Generous":  # where all pays alike, the answer does not tell
        assert states(found)[question] == UNDECIDED
        return
    (finding,) = [each for each in found.findings if each.name == question]
    assert finding.state == WRONG
    assert words in finding.sentence
    assert not found.is_good


def test_rewards_and_lengths_are_within_bounds(checked):
    (finding,) = [each for each in checked("Sound", reward_range=(0, 1)).findings if each.name == "rewards"]
    assert finding.state == WRONG
    assert "from -0.3 to 1 per conversation, 2 different values; expected from 0 to 1" in finding.sentence
    found = checked("Sound", turns=2)
    (length,) = [each for each in found.findings if each.name == "length"]
    assert length.sentence.startswith("1 to 2 turns")


def test_leaks_are_of_whole_words_and_undecided_without_a_truth(checked):
    found = checked("Sound", row=whole_row({"ground_truth": "7"}))
    assert states(found)["leaks"] == UNDECIDED  # one character stands anywhere
    assert states(checked("Sound", row=whole_row({})))["leaks"] == UNDECIDED
    row = whole_row({"ground_truth": "left"})
    assert states(checked("Sound", row=row))["leaks"] == WRONG  # "2 left"
    assert states(checked("Sound", row=whole_row({"ground_truth": "lef"})))["leaks"] == GOOD
    assert states(checked("Shared"))["repeats"] == GOOD
    assert states(checked("Leaky"))["repeats"] == GOOD
    assert states(checked("Moody"))["leaks"] == GOOD


def test_lines_json_and_page_have_every_finding(checked):
    found = checked("Fragile")
    lines = list(as_lines("a.py:Fragile", found))
    assert lines[0] == "a.py:Fragile: wrong: nonsense"
    assert len(lines) == 1 + len(found.findings)
    printed = json.loads(json.dumps(as_json("a.py:Fragile", found), allow_nan=False))
    assert printed["is_good"] is False
    assert {each["script"] for each in printed["scripts"]} == {each.script for each in found.scripts}
    html = page("a.py:<b>Fragile", found)
    assert "a.py:&lt;b&gt;Fragile" in html and "<b>Fragile" not in html
    assert "OverflowError" in html


SHORT_ROW = whole_row({"ground_truth": "ab", "prompt": "What?"})


def asking(*lines):
    """Lines of a person, then the end of input."""
    waiting = list(lines)

    def ask():
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return ask


def test_a_person_plays_without_tokens(load):
    told = []
    play_by_hand(load("Sound").episode(SHORT_ROW, 1), any_form, 8, asking("b", "ab", "never"), tell=told.append)
    assert told == ["user> Say it.", "user> no, 2 left", "reward 0.9"]
    told.clear()
    play_by_hand(load("Sound").episode(SHORT_ROW, 1), any_form, 2, asking("b", "b", "ab"), tell=told.append)
    assert told[-2:] == ["(cut: 2 turns)", "reward -0.2"]
    with pytest.raises(EOFError):  # who leaves
        play_by_hand(load("Sound").episode(SHORT_ROW, 1), any_form, 8, asking("b"), tell=lambda line: None)


def test_calls_are_read_in_any_form():
    call = Call("look", {"key": "a"})
    for text in (
        '<tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>',
        '[look(key="a")]',
        '{"name": "look", "parameters": {"key": "a"}}',
    ):
        assert any_form(text).calls == (call,)
    assert any_form("look at a").calls == ()
    assert any_form("look at a").content == "look at a"
    assert any_form('<tool_call>{"name": ').problems


def test_a_persons_tokens_are_those_of_step_3(load):
    tokenizer = chat_tokenizer(Path("examples/environments/template.jinja").read_text())
    chat = ChatArguments(prompt_style=CHAT_TEMPLATE)
    settings = ActingSettings(chat, EnvironmentArguments(environment="x.py:y"), ConversationArguments(), 100)
    end = tokenizer.eos_token_id

    def acting(engine, partner_of):
        return acting_engine(engine, partner_of, settings, tokenizer, end_token_ids=[end])

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    told = []
    request = request_of(SHORT_ROW, 1, hand_sampling(200, [end], tokenizer.pad_token_id or end), "cpu")
    engine = HandEngine(encode, asking("b", "ab"))
    rollout = play(
        acting, engine, request, load("Sound").episode(SHORT_ROW, 1), model=None, tell=told.append, says="me"
    )
    assert told == ["user> Say it.", "me> b", "user> no, 2 left", "me> ab", "reward 0.9"]
    first, last = [*encode("b"), end], [*encode("ab"), end]
    ids = rollout.response_of(0).tolist()
    assert ids[: len(first)] == first and ids[-len(last) :] == last
    lines = list(token_lines(rollout, tokenizer.decode))
    assert [line[:6] for line in lines] == ["mask 0", "mask 1", "mask 0", "mask 1"]
    counts = [int(line.split()[2]) for line in lines]
    assert counts[1::2] == [len(first), len(last)]
    assert sum(counts[1:]) == len(ids)
    assert counts[0] == int(rollout.prompt_mask_BP.sum())
    drawn = ~rollout.conversations.inserted_BR[0]
    assert int(drawn.sum()) == len(first) + len(last)
    assert torch.tensor(ids)[drawn].tolist() == first + last


def test_a_turn_without_room_is_cut(load):
    engine = HandEngine(lambda text: [1] * len(text), asking("abcdef"))
    rollout = engine.roll_out(None, request_of(SHORT_ROW, 1, hand_sampling(4, [0], 0), "cpu"))
    assert rollout.response_of(0).tolist() == [1] * 4
    assert rollout.ended_B.tolist() == [False]


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
        (["try"], "needs an environment: FILE.py:NAME, or the name of an installed one;"),
        (["check", "a"], "or the name of an installed environment (none), got 'a'"),
        (["check", "FILE:Sound", "--by_hand"], "--by_hand is for `try`, but the task is `check`"),
        (["try", "FILE:Sound", "--by_hand"], "--by_hand needs --model_name_or_path; without"),
        (["try", "FILE:Sound", "--html", "a.html"], "--html is for `check`, but the task is `try`"),
        (["check", "FILE:Sound", "--reward_range", "1", "0"], "--reward_range expects two numbers"),
        (["check", "FILE:Sound", "--row", '{"environment": ""}'], "'environment' is empty has no environment"),
        (["try", "FILE:Sound", "--row", '{"environment": ""}'], "so the row has no environment; pass another --row"),
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
    assert "left before the end of the conversation" in printed.err


def test_tools_are_played_too(tmp_path, capsys, monkeypatch):
    docstring = '    """Add.\n\n    Args:\n        a: A.\n        b: B.\n    """\n'
    (tmp_path / "tool.py").write_text(f"def add(a: int, b: int) -> int:\n{docstring}    return a + b\n")
    lines = iter(["[add(a=1, b=2)]", "3"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    program.main(["try", "--tools", f"{tmp_path}/tool.py:add", "--row", '{"prompt": "1 and 2?"}'])
    assert capsys.readouterr().out.splitlines()[:3] == ["user> 1 and 2?", "tools: add(a, b)", "tool add> 3"]
