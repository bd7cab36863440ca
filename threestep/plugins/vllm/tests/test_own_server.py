"""The command of vLLM's own server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from threestep.plugins.vllm.own_server import server_command
from training.utils.generation.table import ServerOrder

GUARD = "threestep.plugins.vllm.servers.guard.KeyGuard"


def test_the_command_and_the_key_outside_of_it():
    order = ServerOrder("DIR", "name", "127.0.0.1", 8000, "secret", "bfloat16", "T.jinja", {"top_p": 0.9}, 7)
    made = server_command(order)
    assert made.variables["VLLM_API_KEY"] == "secret" and "secret" not in made.words
    assert made.variables["VLLM_NO_USAGE_STATS"] == "1"
    assert made.words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags = dict(zip(made.words[3::2], made.words[4::2], strict=True))
    assert json.loads(flags.pop("--override-generation-config")) == {"top_p": 0.9}
    assert flags == {
        "--model": "DIR", "--served-model-name": "name", "--host": "127.0.0.1", "--port": "8000", "--dtype": "bfloat16",
        "--chat-template": "T.jinja", "--chat-template-content-format": "string", "--generation-config": "vllm",
        "--middleware": GUARD, "--max-num-seqs": "7",
    }  # fmt: skip


def test_the_server_finds_its_guard_from_any_folder(tmp_path):
    made = server_command(ServerOrder("DIR", "n", "127.0.0.1", 8000, "s", "float32", "T", {}, None))
    program = f"from pydoc import locate; assert locate({GUARD!r})(lambda: 0)"
    environment = {**os.environ, "PYTHONPATH": "", **made.variables}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=60)
