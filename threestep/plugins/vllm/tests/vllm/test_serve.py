"""vLLM's own server, as `threestep serve` starts it: nothing but /health answers without the key."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request

import psutil
import pytest

from tests.support.hostile import attack
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.serve.tests.end_to_end.test_serve import started
from threestep.plugins.vllm.tests.vllm.conftest import SHAPES

pytestmark = pytest.mark.timeout(1200)  # vLLM compiles, on a CPU too
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
# Those that vLLM's own key leaves open, and those that it guards.
PATHS = ("/invocations", "/tokenize", "/detokenize", "/metrics", "/docs", "/openapi.json", "/version", "/load", "/ping",
         "/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/models", "/v1/chat/completions", "/")  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_tokenizer):
    place = tmp_path_factory.mktemp("served")
    own = {"vocab_size": len(tiny_tokenizer), "eos_token_id": tiny_tokenizer.eos_token_id}
    model = tiny_causal_lm("llama", pad_token_id=tiny_tokenizer.pad_token_id, **own, **SHAPES["llama"])
    model.save_pretrained(place / "model")
    tiny_tokenizer.init_kwargs["threestep"] = {"prompt_style": "human_assistant"}
    tiny_tokenizer.save_pretrained(place / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants 92 % of a CPU's memory to be free
        found = started(place / "model", place / "log", "--engine", "vllm")
    deadline = time.monotonic() + 900
    try:
        while found.process.poll() is None and time.monotonic() < deadline and status(found, "/health") != 200:
            time.sleep(0.5)
        yield found
    finally:
        found.process.send_signal(signal.SIGTERM)
        found.process.wait(60)


def status(server, path, body=None, key=None, host="127.0.0.1"):
    data = None if body is None else json.dumps(body).encode()
    given = {"Host": host, "Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        request = urllib.request.Request(server.url.removesuffix("/v1") + path, data, given)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
def test_no_path_answers_without_the_key(server, path, host):
    for body in (None, CHAT):
        assert status(server, path, body, host=host) == status(server, path, body, "wrong", host) == 401


def test_who_has_the_key_is_answered_while_others_are_silent(server):
    assert status(server, "/health") == status(server, "/metrics", key=server.key) == 200, server.log.read_text()
    [process] = psutil.Process(server.process.pid).children()
    port = int(server.url.split(":")[2].split("/")[0])

    def ask():
        return status(server, "/v1/chat/completions", CHAT, server.key)

    attack(port, "/invocations", ask, process=process).check(most_threads=32)
