"""Compiles device.cpp, once for each version of it and for each torch. Needs a C++ compiler and ninja."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

SOURCE = Path(__file__).with_name("device.cpp")
_BUILD = """
import os, sys, torch
from torch.utils.cpp_extension import load
libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
load("stand_in", [sys.argv[1]], build_directory=sys.argv[2], is_python_module=False, extra_cflags=["-O0"],
     extra_ldflags=["-Wl,-rpath," + libraries])
"""


def why_not() -> str | None:
    """What is missing for it; None if nothing is."""
    if not sys.platform.startswith("linux"):
        return "the pretended GPU is built for Linux alone"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "the pretended GPU needs a C++ compiler (CXX may name one), and this machine has none"
    if Version(version("torch")) < Version("2.13"):
        return "the pretended GPU implements the C++ interface of torch 2.13, and this torch is older"
    return None


def torch_installed_at() -> str:
    """torch's file, which is found without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return found.origin


def folder_for(torch_file: str) -> Path:
    """Where the library for that torch lies.

    A library names the folder of the torch it was linked to. One of another environment that is gone by now, with the
    same version of torch, would not load: "libc10.so: cannot open shared object file".
    """
    made_from = SOURCE.read_bytes() + f"{version('torch')} {sys.version} {torch_file}".encode()
    key = hashlib.sha256(made_from).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"threestep_cuda_stand_in_{os.getuid()}" / key


def built_library() -> Path:
    """The shared library, compiled where it was not yet (15 seconds of CPU), by one process of several that ask.

    Raises AssertionError with what the compiler wrote.
    """
    folder = folder_for(torch_installed_at())
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "stand_in.so"
    with open(f"{folder}.lock", "w") as lock:  # torch waits for the end of whoever has made a file `lock` in it
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = folder / "finished"
        if not finished.exists():
            words = [sys.executable, "-c", _BUILD, str(SOURCE), str(folder)]
            said = subprocess.run(words, capture_output=True, text=True, check=False)
            assert said.returncode == 0, f"the pretended GPU does not compile:\n{said.stdout}{said.stderr}"
            finished.touch()
    return library
