"""The web page without Gradio: its sentence, what it tells, where it listens."""

from __future__ import annotations

import sys

import pytest

from threestep.plugins.evaluation import web
from threestep.plugins.evaluation.talk import Talk
from training.utils.base.errors import ThreestepError
from training.utils.generation.arguments import SamplingArguments


def test_a_missing_package_is_one_sentence(asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ThreestepError, match="--web needs the package gradio, which is not installed; run: pip"):
        web.serve(lambda: Talk([asked], SamplingArguments(), 1), 7860, print)


def test_it_listens_on_this_machine_alone_and_says_where_it_cannot(monkeypatch):
    said, served = [], []
    monkeypatch.setattr(web, "guarded_page", lambda new_talk, door: "the page behind its door")

    class Server:
        def run(self, sockets):
            served.append(sockets[0].getsockname())
            with pytest.raises(ThreestepError, match=f"--web_port {served[0][1]}: .* in use; give another port"):
                web.serve(None, served[0][1], said.append)

    monkeypatch.setattr(web, "server_of", lambda app: Server())
    web.serve(None, 0, said.append)
    assert served[0][0] == "127.0.0.1" and said[0].startswith(f"http://127.0.0.1:{served[0][1]}/?token=")
    assert "#asking { position: fixed; left: 0; right: 0; bottom: 0" in web._STYLE  # what one types stays on a phone


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


def test_controls_set_what_they_stand_for(asked):
    talk = Talk([asked], SamplingArguments(max_new_tokens=3), 1)
    for name, value in (("temperature", 0.5), ("top_p", 0.9), ("top_k", 7), ("max_new_tokens", 5), ("seed", 9)):
        assert web.change(talk, name, value) == ""
    assert web.values_of(talk) == ["", 0.5, 0.9, 7, 5, 9]
    assert web.change(talk, "temperature", -1).startswith("--temperature expects 0 or more, got -1")
    assert talk.sampling.temperature == 0.5
    talk.ask("Hi")
    assert web.change(talk, "system", "") == "" and talk.turns  # left as it was
    assert web.change(talk, "system", "Be short") == "" and not talk.turns and talk.system == "Be short"


def test_the_page_has_a_title_controls_and_a_stop(asked):
    pytest.importorskip("gradio", reason="needs the package gradio: pip install gradio")
    page = web.build_page(lambda: Talk([asked], SamplingArguments(), 1))
    parts = page.config["components"]
    assert page.title == f"{asked.name} · Threestep"
    labels = {str(part["props"].get("label") or part["props"].get("value")) for part in parts}
    assert {"Stop", "Send", "Again", "New", "seed", "most tokens of an answer"} <= labels
    assert any(function.get("cancels") for function in page.config["dependencies"])
