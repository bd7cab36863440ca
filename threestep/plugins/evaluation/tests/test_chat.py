"""The terminal: what is read, what is written, what ends it."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from tests.support.saved_models import save_pair
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from threestep.plugins.evaluation import chat
from threestep.plugins.serving.ports import listening
from training.utils.base.errors import ThreestepError


@pytest.fixture
def folders(tmp_path, tiny_tokenizer):
    for name, make in (("one", tiny_causal_lm), ("two", tiny_causal_lm), ("reward", tiny_scalar_model)):
        save_pair(tmp_path / name, tiny_tokenizer, make)
    return tmp_path


def run(monkeypatch, flags, text: str, lines: list[str] | None = None) -> None:
    """`text` on standard input; with `lines`, a terminal on which these are typed."""
    stdin = io.StringIO(text)
    stdin.isatty = lambda: lines is not None  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stdin)
    typed = iter(lines or [])

    def read(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    chat.main([str(flag) for flag in flags])


def test_one_question_from_standard_input(folders, monkeypatch, capsys):
    flags = [folders / "one", "--max_new_tokens", 6, "--reward_model", folders / "reward"]
    run(monkeypatch, flags, "Hi\n")
    first = capsys.readouterr()
    styles = [f"{folders / name}: prompt style: human_assistant, responses end with" for name in ("one", "reward")]
    said = first.err.splitlines()
    assert first.out.strip() and said[2].startswith(f"score of {folders / 'one'}: ")
    assert [line[: len(style)] for line, style in zip(said, styles, strict=False)] == styles
    run(monkeypatch, flags, "Hi\n")
    assert capsys.readouterr() == first
    run(monkeypatch, [folders / "one", folders / "two", *flags[1:3]], "Hi\n")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"== A {folders / 'one'}" and f"== B {folders / 'two'}" in said
    with pytest.raises(ThreestepError, match="expects a question, got none; write one to it"):
        run(monkeypatch, flags, " \n")


def test_a_terminal(folders, monkeypatch, capsys):
    lines = ["/help", "Hi", "", "/nothing", "Hi " * 200, "/max_new_tokens 3", "/retry", "/quit", "never"]
    run(monkeypatch, [folders / "one", "--max_new_tokens", 6, "--temperature", 0], "", lines)
    said = capsys.readouterr().out
    assert "/temperature" in said and said.count("model> ") == 3
    assert "error: unknown command /nothing" in said and "which leaves no room" in said
    assert "(cut)" in said
    run(
        monkeypatch,
        [folders / "one", folders / "two", "--reward_model", folders / "reward"],
        "",
        ["/max_new_tokens 3", "Hi"],
    )
    said = capsys.readouterr().out
    assert f"A {folders / 'one'}> " in said and f"B {folders / 'two'}> " in said and said.count("  score ") == 2


def test_ctrl_c_stops_an_answer_and_not_the_program(folders, monkeypatch, capsys):
    calls = []

    def stopped(talk, place):
        calls.append(place)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "show_answer", stopped)
    run(monkeypatch, [folders / "one"], "", ["Hi", "Hi"])
    assert calls == [0, 0] and capsys.readouterr().out.count("(stopped)") == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], r"expected one model or two, got 0: MODEL \[MODEL2\] before the flags"),
        (["a", "b", "c"], "expected one model or two, got 3"),
        (["a", "--prompt_style", "x"], "--prompt_style expects one of auto, human_assistant, as_stored,"),
        (["a", "--seed", "-1"], "--seed expects 0 or more, got -1"),
        (["a", "--web_port", "0"], "--web_port expects a number from 1 to 65535, got 0"),
        (["a", "--tools", "python_no_sandbox", "--reward_model", "d"], "--reward_model reads answers of one turn, and"),
        (["a", "--row", "{}"], "--row {} opens an environment, and there is none; give --environment, or leave it"),
        (["a", "--max_tool_calls", "3"], "--max_tool_calls 3 limits conversations, and there are none; give"),
        (["/nowhere/a"], "the model folder '/nowhere/a' does not exist"),
    ],
)
def test_mistakes(flags, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        chat.main(flags)


def test_a_page_that_cannot_be_served_is_refused_before_a_model_is_loaded(folders, monkeypatch):
    monkeypatch.setattr(chat, "loaded", None)
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ThreestepError, match="--web needs the package gradio"):
        chat.main([str(folders / "one"), "--web"])
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace())
    with listening(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ThreestepError, match=f"^--web_port {port}: .* in use; give another port$"):
            chat.main([str(folders / "one"), "--web", "--web_port", str(port)])


def test_a_question_of_standard_input_keeps_its_last_blank(folders, monkeypatch, capsys):
    """And each question is asked alone."""
    asked = []
    monkeypatch.setattr(
        "threestep.plugins.evaluation.talk.stream_answer", lambda model, messages, *given: asked.append(messages) or []
    )
    for style in ("as_stored", "human_assistant"):
        run(monkeypatch, [folders / "one", "--prompt_style", style], "2 + 3 = \n")
    assert [messages[-1]["content"] for messages in asked] == ["2 + 3 = ", "2 + 3 ="]
    said = capsys.readouterr().err
    assert said.count("a question is asked as it is typed, without the turns before it, as its rows were") == 1
