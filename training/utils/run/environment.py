"""The environment of a run: versions, and the time of its start. Imports none of the packages that it names."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from typing import Any

import training

_PACKAGES = ("torch", "deepspeed", "transformers")


def environment_of(device: str) -> dict[str, Any]:
    """The content of environment.json. device: in words."""
    versions = {"threestep": training.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # on the path without being installed
            continue
    started = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return {"device": device, "started": started, "versions": versions}
