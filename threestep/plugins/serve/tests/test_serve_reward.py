"""The program that serves a reward model: its address, its key and its mistakes."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tests.support.saved_models import save_pair
from tests.support.tiny_models import tiny_scalar_model
from threestep.plugins.serve import serve_reward
from threestep.plugins.serve.endpoint import reward_server
from training.utils.base.errors import ThreestepError


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv(serve_reward.KEY_VARIABLE, raising=False)


@pytest.fixture
def path(tmp_path, tiny_tokenizer):
    return save_pair(tmp_path / "rm", tiny_tokenizer, tiny_scalar_model)


class Ended(threading.Event):
    """Asked to end soon after it serves."""

    def wait(self, timeout=None):
        time.sleep(0.3)
        return True


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 (that is what is asked for)
def test_it_says_where_it_serves_and_shows_a_new_key_alone(path, monkeypatch, capsys, host):
    served = reward_server.ServedReward("rm", None, None, 64, "")
    monkeypatch.setattr(reward_server, "load_served_reward", lambda *given: served)
    monkeypatch.setattr(threading, "Event", Ended)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    serve_reward.main([path, "--served_name", "rm", "--port", "0", "--host", host])
    said = capsys.readouterr()
    assert f"'rm' at http://{host}:" in said.out and "/v1/scores (Ctrl-C ends)" in said.out and "key: sk-" in said.out
    assert ("is open to other machines, and HTTP hides neither key nor texts" in said.err) == (host != "127.0.0.1")
    monkeypatch.setenv(serve_reward.KEY_VARIABLE, "of-the-environment")
    serve_reward.main([path, "--port", "0"])
    said = capsys.readouterr().out
    assert "key: the given one" in said and "of-the-environment" not in said


def test_mistakes_are_sentences(path):
    with pytest.raises(ThreestepError, match="expected a model, got none: MODEL before the flags"):
        serve_reward.main([])
    with pytest.raises(ThreestepError, match="--host 192.0.2.1: this machine has no such address; give one of its own"):
        serve_reward.main([path, "--host", "192.0.2.1", "--port", "0"])
