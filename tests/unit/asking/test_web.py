"""The web page without Gradio: its sentence, what it tells, where it listens."""

from __future__ import annotations

import sys

import pytest

from training.asking import web
from training.asking.talk import Talk
from training.utils.generation.arguments import SamplingArguments
from training.utils.run.errors import ThreestepError


def test_a_missing_package_is_one_sentence(asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(
        ThreestepError, match="--web needs the package gradio, which is not installed; run: pip install"
    ):
        web.serve(lambda: Talk([asked], SamplingArguments(), 1), 7860)


def test_it_listens_on_this_machine_alone_and_says_where_it_cannot(asked, monkeypatch):
    launched = {}

    class Page:
        def launch(self, **how):
            launched.update(how)
            raise OSError("Cannot find empty port in range: 7860-7860")

    monkeypatch.setattr(web, "build_page", lambda new_talk: Page())
    with pytest.raises(ThreestepError, match="--web_port 7860: Cannot find empty port .*; give another port"):
        web.serve(lambda: Talk([asked], SamplingArguments(), 1), 7860)
    assert (launched["server_name"], launched["share"]) == ("127.0.0.1", False)


def test_lines_become_answers_and_notes(asked):
    talk = Talk([asked], SamplingArguments(max_new_tokens=3), 1)
    assert list(web.respond(talk, "/temperature 0")) == ["temperature is 0.0"]
    assert set(web.respond(talk, "Hi")) == {""}
    shown = web._columns(talk, "")
    assert [entry["role"] for entry in shown[0]] == ["user", "assistant"]
    assert list(web.respond(talk, "/nothing"))[0].startswith("unknown command /nothing")
    assert list(web.respond(talk, "  ")) == []
    assert list(web.respond(talk, "/save x")) == ["/save is available only in the terminal"]
    assert list(web.respond(talk, "/quit")) == ["to end, close the page and stop the program"]
