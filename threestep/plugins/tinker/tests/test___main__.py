"""The program that serves training: its address, its key and its mistakes."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.tinker import __main__ as program
from threestep.plugins.tinker import opening
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints import other_runs


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv(program.KEY_VARIABLE, raising=False)


@pytest.fixture
def words(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    return [str(tmp_path / "base"), "--output_dir", str(tmp_path / "state"), "--port", "0"]


class Ended(threading.Event):
    """Asked to end soon after it serves."""

    def wait(self, timeout=None):
        time.sleep(0.3)
        return True


def test_it_says_where_it_serves_and_shows_a_new_key_alone(words, monkeypatch, capsys):
    computing = SimpleNamespace(start=lambda: None, close=lambda: None)
    monkeypatch.setattr(opening, "open_service", lambda *given, **more: (None, computing))
    monkeypatch.setattr(threading, "Event", Ended)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    program.main([*words, "--served_name", "mine", "--host", "0.0.0.0"])
    said = capsys.readouterr()
    assert "'mine' at http://0.0.0.0:" in said.out and "key: tml-" in said.out
    assert "can be reached from other machines, and HTTP does not encrypt the key or" in said.err
    monkeypatch.setenv(program.KEY_VARIABLE, "tml-of-the-environment")
    program.main(words)
    said = capsys.readouterr().out
    assert "key: the one you provided" in said and "of-the-environment" not in said


def test_mistakes_are_sentences(words, monkeypatch, tmp_path):
    with pytest.raises(ThreestepError, match="expected a model, got none; put MODEL before the flags"):
        program.main([])
    (tmp_path / "key").write_text("sk-of-another")
    with pytest.raises(ThreestepError, match="--api_key_file .*key expects a key that begins with tml-, because the"):
        program.main([*words, "--api_key_file", str(tmp_path / "key")])
    monkeypatch.setenv(program.KEY_VARIABLE, "sk-of-another")
    with pytest.raises(ThreestepError, match="THREESTEP_API_KEY expects a key that begins with tml-"):
        program.main(words)


def test_a_folder_serves_one_at_a_time_and_no_empty_address_opens_it_to_all(words, monkeypatch, tmp_path):
    monkeypatch.setattr(other_runs, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(opening, "open_service", lambda *given, **more: pytest.fail("it was opened"))
    with other_runs.only_run(tmp_path / "state"):
        with pytest.raises(ThreestepError, match="--output_dir .*state is in use by a run: process"):
            program.main(words)
    for host in ("", " "):
        with pytest.raises(ThreestepError, match="--host expects an address, got '.?'; use 127.0.0.1, or 0.0.0.0"):
            program.main([*words, "--host", host])
