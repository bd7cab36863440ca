"""The programs that serve a model and a reward model: keys, addresses and messages, and the engine that serves."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.saved_models import save_pair
from tests.support.tiny_models import tiny_scalar_model
from threestep.plugins.serve import serve, serve_reward
from threestep.plugins.serve.endpoint import reward_server
from training.utils.base.errors import ThreestepError
from training.utils.generation.table import ServerCommand


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    return save_pair(tmp_path / "model", tiny_tokenizer)


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)


def test_a_key_is_new_each_time_or_given(tmp_path, monkeypatch):
    keys = [serve.key_of(None) for _ in range(3)]
    assert len({key for key, _ in keys}) == 3 and all(len(key) == 51 and is_new for key, is_new in keys)
    monkeypatch.setenv(serve.KEY_VARIABLE, "of-the-variable\n")
    assert serve.key_of(None) == ("of-the-variable", False)
    (tmp_path / "key").write_text(" of-the-file\n")
    assert serve.key_of(str(tmp_path / "key")) == ("of-the-file", False)


def test_a_key_that_no_header_can_have_is_refused(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("two words")
    with pytest.raises(ThreestepError, match="--api_key_file .*: the key must be printable ASCII characters without"):
        serve.key_of(str(tmp_path / "key"))
    monkeypatch.setenv(serve.KEY_VARIABLE, "")
    with pytest.raises(ThreestepError, match="THREESTEP_API_KEY: the key must be printable ASCII characters"):
        serve.key_of(None)
    with pytest.raises(
        ThreestepError,
        match="must be a file with a key, but it cannot be read: No such file or directory; use another",
    ):
        serve.key_of(str(tmp_path / "none"))


def test_words_that_are_missing_or_wrong_are_sentences(folder, monkeypatch):
    with pytest.raises(ThreestepError, match="expected a model, got none; put MODEL before the flags"):
        serve.main([])
    with pytest.raises(ThreestepError, match="--engine expects one of auto, ours, vllm, got 'hf'"):
        serve.main([folder, "--engine", "hf"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(serve, "with_own_server", None)  # nothing is loaded, nor is an engine looked for
        with pytest.raises(ThreestepError, match=f"--port {port}: .* in use; choose another port"):
            serve.main([folder, "--port", str(port)])


def test_the_address_comes_with_the_models_id_and_a_line_that_asks(capsys):
    serve.announce("it's/mine", 8001, "sk-secret", True)
    printed = capsys.readouterr().out
    assert "model id: it's/mine; example request with the key in THREESTEP_API_KEY:\n" in printed
    words = shlex.split(printed[printed.index("curl ") :].replace("\\\n", ""))
    assert words[:2] == ["curl", "http://127.0.0.1:8001/v1/chat/completions"]
    assert words[2:6] == ["-H", "Authorization: Bearer $THREESTEP_API_KEY", "-H", "Content-Type: application/json"]
    assert words[6] == "-d" and json.loads(words[7])["model"] == "it's/mine"
    assert printed.count("sk-secret") == 1


class Installed:
    """An engine that is there."""

    @staticmethod
    def check_installed() -> None:
        """Nothing is missing."""


def test_an_engine_that_is_not_installed_is_asked_for_in_vain(folder, monkeypatch, capsys):
    def missing():
        raise ThreestepError("--rollout_engine vllm needs vLLM, which is not installed here; run: pip")

    monkeypatch.setattr(serve, "engine_class", lambda name: SimpleNamespace(check_installed=missing))
    with pytest.raises(ThreestepError, match="^--engine vllm needs vLLM, which is not installed here; run: pip"):
        serve.main([folder, "--engine", "vllm"])
    assert serve.with_own_server(serve.ServeArguments(folder)) is None
    assert "Threestep's own loop: vllm is not installed" in capsys.readouterr().err


def test_an_installed_engine_serves_what_it_asks_as_in_training(folder, monkeypatch, capsys):
    monkeypatch.setattr(serve, "engine_class", lambda name: Installed)
    orders = []

    def command_of(name):
        return lambda order: orders.append(order) or ServerCommand([sys.executable, "-c", "raise SystemExit(0)"], {})

    monkeypatch.setattr(serve, "server_command_of", command_of)
    serve.main([folder, "--port", "0", "--temperature", "0.5", "--top_p", "1.0", "--served_name", "m"])
    said = capsys.readouterr()
    assert f"'m' at http://127.0.0.1:{orders[0].port}/v1" in said.out and f"key: {orders[0].key}" in said.out
    assert orders[0].defaults == {"temperature": 0.5} and orders[0].dtype == "float32" and orders[0].most_rows is None
    monkeypatch.setattr("threestep.plugins.serve.endpoint.own_server.template_of", lambda model: None)
    with pytest.raises(
        ThreestepError, match="--engine vllm cannot serve .*there is no chat template for prompts in the"
    ):
        serve.main([folder, "--engine", "vllm"])
    assert serve.with_own_server(serve.ServeArguments(folder)) is None
    assert "Threestep's own loop, not vllm: there is no chat template" in capsys.readouterr().err


def test_a_child_that_fails_ends_the_program_with_its_code(folder, monkeypatch):
    monkeypatch.setattr(serve, "engine_class", lambda name: Installed)
    failing = ServerCommand([sys.executable, "-c", "raise SystemExit(7)"], {})
    monkeypatch.setattr(serve, "server_command_of", lambda name: lambda order: failing)
    with pytest.raises(SystemExit) as ended:
        serve.main([folder])
    assert ended.value.code == 7


@pytest.fixture
def reward_folder(tmp_path, tiny_tokenizer):
    return save_pair(tmp_path / "rm", tiny_tokenizer, tiny_scalar_model)


class Ended(threading.Event):
    """Asked to end soon after it serves."""

    def wait(self, timeout=None):
        time.sleep(0.3)
        return True


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 (that is what is asked for)
def test_it_says_where_it_serves_and_shows_a_new_key_alone(reward_folder, monkeypatch, capsys, host):
    served = reward_server.ServedReward("rm", None, None, 64, "")
    monkeypatch.setattr(reward_server, "load_served_reward", lambda *given: served)
    monkeypatch.setattr(threading, "Event", Ended)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    serve_reward.main([reward_folder, "--served_name", "rm", "--port", "0", "--host", host])
    said = capsys.readouterr()
    assert (
        f"'rm' at http://{host}:" in said.out
        and ("/v1/scores (Ctrl-C stops it)") in said.out
        and "key: sk-" in said.out
    )
    assert ("can be reached from other machines, and HTTP does not encrypt the key or" in said.err) == (
        host != "127.0.0.1"
    )
    monkeypatch.setenv(serve_reward.KEY_VARIABLE, "of-the-environment")
    serve_reward.main([reward_folder, "--port", "0"])
    said = capsys.readouterr().out
    assert "key: the one you provided" in said and "of-the-environment" not in said


def test_mistakes_of_a_reward_model_are_sentences(reward_folder):
    with pytest.raises(ThreestepError, match="expected a model, got none; put MODEL before the flags"):
        serve_reward.main([])
    with pytest.raises(ThreestepError, match="--host 192.0.2.1: this machine has no such address; use one that it has"):
        serve_reward.main([reward_folder, "--host", "192.0.2.1", "--port", "0"])
