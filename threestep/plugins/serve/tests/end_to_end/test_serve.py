"""`threestep serve` as programs meet it: the command, and OpenAI's own client."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.pages import blocks
from tests.support.saved_models import save_pair

has_openai = importlib.util.find_spec("openai") is not None
pytestmark = [pytest.mark.end_to_end, pytest.mark.skipif(not has_openai, reason="needs openai: pip install openai")]
ROOT = Path(__file__).parents[5]
HI = [{"role": "user", "content": "Hi"}]


def started(folder: Path, log: Path, *flags: str) -> SimpleNamespace:
    """A server of the model in `folder`: its process, address and key."""
    words = [sys.executable, "-m", "threestep", "serve", str(folder), "--served_name", "tiny", "--port", "0", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "THREESTEP_API_KEY"}
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120
    while "curl " not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    said = log.read_text()
    assert "key: " in said, said
    address = said.partition("http://")[2].split()[0]
    return SimpleNamespace(process=process, url=f"http://{address}", key=said.partition("key: ")[2].split()[0], log=log)


def client_of(server: SimpleNamespace, **changes):
    from openai import OpenAI

    return OpenAI(**{"base_url": server.url, "api_key": server.key, "max_retries": 0, "timeout": 60, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    place = tmp_path_factory.mktemp("served")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.init_kwargs["threestep"] = {"prompt_style": "human_assistant"}
    save_pair(place / "model", tokenizer)
    return place / "model"


@pytest.fixture(scope="module")
def server(folder):
    found = started(folder, folder.parent / "log", "--max_rows", "16", "--engine", "ours")
    yield found
    if found.process.poll() is None:
        found.process.terminate()
    assert found.process.wait(60) == 0


@pytest.fixture
def client(server):
    return client_of(server)


def asked(client, text: str = "Hi", **fields):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tiny", messages=messages, **{"max_tokens": 12, **fields})


def test_chat_and_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = asked(client, temperature=0)
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == 12 or choice.finish_reason == "stop"


def test_the_printed_command_line_asks(server):
    printed = server.log.read_text()
    line = printed[printed.index("curl ") :].partition("}]}'")[0] + "}]}'"
    environment = {**os.environ, "THREESTEP_API_KEY": server.key}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["choices"][0]["message"]["content"], done


@pytest.mark.parametrize(
    ("page", "name"), [("docs/after_training.md", "answer.py"), ("threestep/plugins/serve/README.md", "ask.py")]
)
def test_the_pages_programs_run(server, folder, page, name, tmp_path):
    (tmp_path / "runs" / "ppo").mkdir(parents=True)
    (tmp_path / "runs" / "ppo" / "model").symlink_to(folder)
    text = (ROOT / page).read_text()
    program = next(block.content for block in blocks(text) if block.label == name)
    environment = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": server.key}
    words = [sys.executable, "-c", program.replace("256", "24")]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = asked(client_of(server), "What is 2 + 3?", temperature=0, max_tokens=24).choices[0].message.content
    assert done.stdout.strip().startswith(answer.strip()[:8]) and answer


def test_mistakes_are_openais_errors(client, server):
    import openai

    with pytest.raises(openai.AuthenticationError, match="needs the key that it printed when it started"):
        asked(client_of(server, api_key="sk-wrong"))
    with pytest.raises(
        openai.NotFoundError, match="'model' must be 'tiny', the only model on this server, got 'gpt-4'"
    ):
        client.chat.completions.create(model="gpt-4", messages=HI)
    with pytest.raises(
        openai.BadRequestError, match="'frequency_penalty' is not supported, so it must be 0"
    ) as refusal:
        asked(client, frequency_penalty=0.5)
    assert refusal.value.param == "frequency_penalty"
    with pytest.raises(openai.RateLimitError, match="responses are waiting, and 128 more would exceed the limit"):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: asked(client, n=128), range(8)))


def test_what_is_drawn_is_sent_before_the_end(folder):
    server = started(folder, folder.parent / "ending", "--engine", "ours")
    client = client_of(server)
    stream = asked(client, max_tokens=100, seed=4, stream=True)
    first = next(iter(stream))
    server.process.terminate()
    rest = list(stream)
    assert server.process.wait(60) == 0 and first.choices and rest[-1].choices[0].finish_reason is not None
    assert "stopping: " in server.log.read_text()
