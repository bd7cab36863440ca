"""Runs functions of tests in the process that pretends to have a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.cuda_stand_in.building import built_library

ROOT = Path(__file__).parents[3]
_ENVIRONMENT = {
    "DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
}  # fmt: skip


class StandIn:
    """The process, which starts with the first case (some seconds of imports) and ends with `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, case: Callable[..., Any], *arguments: Any) -> Any:
        """Call `case(*arguments)` in a fork of the process, and return what it returns. `case` is a function of a file.

        Raises AssertionError with what the case printed, if it fails.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="threestep_on_cuda_") as place:
            result, said = Path(place, "result.json"), Path(place, "said.txt")
            request = {
                "file": case.__code__.co_filename, "function": case.__name__,  # type: ignore[attr-defined]
                "arguments": [str(part) if isinstance(part, Path) else part for part in arguments],
                "result": str(result), "said": str(said),
            }  # fmt: skip
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            code = process.stdout.readline().strip()
            if code != "0":
                text = said.read_text(errors="replace") if said.exists() else "nothing"
                raise AssertionError(
                    f"{request['function']} on the pretended GPU ended with {code}, and printed:\n{text}"
                )
            return json.loads(result.read_text(encoding="utf-8"))

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            words = [sys.executable, "-m", "tests.support.cuda_stand_in.server", str(built_library())]
            environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
            self._process = subprocess.Popen(
                words, env={**environment, **_ENVIRONMENT}, cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert self._process.stdout is not None
            assert self._process.stdout.readline().strip() == "ready", "the pretended GPU did not start"
        return self._process
