"""The terminal: what is read, what is written, what ends it; turns, commands, scores."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest

from tests.support.saved_models import save_pair
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from tests.unit.utils.base.test_credentials import check_flags_of_text
from threestep.plugins.evaluation import chat
from threestep.plugins.evaluation.model import Answer, load_chat_model
from threestep.plugins.evaluation.scorer import load_answer_scorer
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.evaluation.tests.conftest import CPU
from threestep.plugins.serving.ports import listening
from training.utils.base import credentials
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.data.formats.messages import read_messages
from training.utils.engine.ranks.startup import Ranks
from training.utils.generation.arguments import SamplingArguments


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
    with pytest.raises(
        ThreestepError,
        match="standard input is empty and not a terminal; pipe a question in: echo QUESTION | threestep chat MODEL",
    ):
        run(monkeypatch, flags, " \n")


def test_a_terminal(folders, monkeypatch, capsys):
    lines = ["/help", "Hi", "", "/nothing", "Hi " * 200, "/max_new_tokens 3", "/retry", "/quit", "never"]
    run(monkeypatch, [folders / "one", "--max_new_tokens", 6, "--temperature", 0], "", lines)
    said = capsys.readouterr().out
    assert "/temperature" in said and said.count("model> ") == 3
    assert "error: unknown command /nothing" in said and "which leaves no room" in said
    assert "(cut)" in said
    models = [folders / "one", folders / "two", "--reward_model", folders / "reward"]
    run(monkeypatch, models, "", ["/max_new_tokens 3", "Hi"])
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
        ([], r"expected one or two models, got 0; put MODEL \[MODEL2\] before the flags"),
        (["a", "b", "c"], "expected one or two models, got 3"),
        (["a", "--prompt_style", "x"], "--prompt_style expects one of auto, human_assistant, as_stored,"),
        (["a", "--seed", "-1"], "--seed expects 0 or more, got -1"),
        (["a", "--web_port", "0"], "--web_port expects a number from 1 to 65535, got 0"),
        (
            ["a", "--tools", "python_no_sandbox", "--reward_model", "d"],
            "--reward_model supports only single-turn responses, not",
        ),
        (["a", "--row", "{}"], "--row {} opens an environment, but none is given; pass --environment, or remove"),
        (["a", "--max_tool_calls", "3"], "--max_tool_calls 3 limits conversations, but this run has none; pass"),
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
        with pytest.raises(ThreestepError, match=f"^--web_port {port}: .* in use; choose another port$"):
            chat.main([str(folders / "one"), "--web", "--web_port", str(port)])


def test_a_question_of_standard_input_keeps_its_last_blank(folders, monkeypatch, capsys):
    """And each question is asked alone."""
    asked, streamed = [], "threestep.plugins.evaluation.talk.stream_answer"
    monkeypatch.setattr(streamed, lambda model, messages, *given: asked.append(messages) or [])
    for style in ("as_stored", "human_assistant"):
        run(monkeypatch, [folders / "one", "--prompt_style", style], "2 + 3 = \n")
    assert [messages[-1]["content"] for messages in asked] == ["2 + 3 = ", "2 + 3 ="]
    said = capsys.readouterr().err
    assert said.count("each question is sent alone, without earlier turns, as in the training rows") == 1


def test_a_secret_in_any_flag_of_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(credentials, "_hidden", set())
    check_flags_of_text(chat.GROUPS, None, tmp_path, capsys)


@pytest.fixture
def talk(save_model) -> Talk:
    data = DataArguments()
    models = [load_chat_model(save_model(name, seed=seed), None, data, CPU) for seed, name in enumerate("AB")]
    scorer = load_answer_scorer(save_model("reward", scalar=True), None, data, Ranks(0, 0, 1, CPU))
    return Talk(models, SamplingArguments(max_new_tokens=6), 7, scorer)


def answered(talk: Talk, said: str) -> list[str]:
    talk.ask(said)
    return [list(talk.answer(place))[-1].text for place in range(len(talk.models))]


def test_each_model_sees_its_own_answers(talk):
    first = answered(talk, "Hi")
    assert first[0] != first[1]
    talk.ask("And now?")
    for place in (0, 1):
        assert talk.messages(place) == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": first[place].strip()},
            {"role": "user", "content": "And now?"},
        ]


def test_the_seed_decides_and_retry_draws_anew(talk):
    first = answered(talk, "Hi")
    assert talk.command("/reset").text == "new conversation"
    assert answered(talk, "Hi") == first
    assert talk.command("/retry").answer
    assert [list(talk.answer(place))[-1].text for place in (0, 1)] != first
    talk.command("/reset")
    assert talk.command("/seed 8").text == "seed is 8"
    assert answered(talk, "Hi") != first


def test_scores_of_ids_and_of_texts_agree(talk, save_model):
    talk.ask("Hi")
    list(talk.answer(0))
    ids = [*talk.models[0].tokenizer(" fig").input_ids, talk.models[0].end_token_id]
    talk.turns[-1].answers[0] = Answer(" fig", tuple(ids), ended=True)
    score = talk.score(0)
    prompt, response = talk.scorer.ids_of_text([{"role": "user", "content": "Hi"}], "fig")
    assert talk.scorer.score_ids([prompt], [response]) == [pytest.approx(score)]
    assert talk.turns[-1].scores == {0: score}
    assert talk.score(1) is None  # it has not answered


def test_sampling_is_set_and_told(talk):
    assert talk.command("/temperature 0").text == "temperature is 0.0"
    assert talk.command("/max_new_tokens").text == "max_new_tokens is 6"
    assert talk.command("/top_k 3").text == "top_k is 3" and talk.sampling.top_k == 3
    for line, sentence in [
        ("/top_p 2", "--top_p expects more than 0 and at most 1, got 2.0"),
        ("/temperature warm", "/temperature expects a number, got 'warm'"),
        ("/seed x", "/seed expects a whole number of 0 or more, got 'x'"),
        ("/seed ²", "/seed expects a whole number of 0 or more, got '²'"),
        ("/temprature 1", "unknown command /temprature; /help lists the commands; did you mean '/temperature'"),
        ("/retry", "/retry expects an earlier question, got none; ask one first"),
        ("/save", "/save expects a file name, got none; type /save FILE"),
    ]:
        with pytest.raises(ThreestepError, match=sentence):
            talk.command(line)
    assert talk.sampling.top_p == 1.0


def test_a_system_prompt_begins_anew(talk):
    answered(talk, "Hi")
    assert talk.command("/system Be brief.").text == "new conversation with this system prompt"
    talk.ask("Hi")
    assert talk.messages(0)[0] == {"role": "system", "content": "Be brief."} and len(talk.messages(0)) == 2
    assert talk.command("/system").text == "new conversation without a system prompt"
    assert talk.messages(0) == []


def test_what_is_saved_is_a_dataset(talk, tmp_path):
    answered(talk, "Hi")
    path = tmp_path / "talk.jsonl"
    assert talk.command(f"/save {path}").text == f"written to {path}, one line per model"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["model"] for line in lines] == [asked.name for asked in talk.models]
    assert read_messages(lines[0]["messages"], "a line") == talk.messages(0)
    with pytest.raises(ThreestepError, match="File exists; name another file"):
        talk.command(f"/save {path}")


def test_a_question_that_nobody_answered_is_forgotten(talk):
    talk.ask("Hi " * 200)
    with pytest.raises(ThreestepError, match="leaves no room for an answer"):
        list(talk.answer(0))
    talk.drop_turn()
    assert talk.turns == []
