"""Training clients and their checkpoints as the client's `RestClient` lists them: read from their files alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from training.serve_training.desk import UnknownRequest
from training.serve_training.store import SAMPLER, STATE, ClientFolder, Store

_PATH = re.compile(r"training_runs/([^/]+)(/checkpoints)?")
_CHECKPOINT = re.compile(r"training_runs/([^/]+)/checkpoints/([^/]+/[^/]+)")
_TYPES = {STATE: "training", SAMPLER: "sampler"}


def run_page(path: str, find: Callable[[str], ClientFolder], base: str) -> dict[str, Any] | None:
    """Answer a GET of a client or its checkpoints; None for another path. UnknownRequest for no client."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    files = _client(find, found[1])
    checkpoints = [_checkpoint(files, part, place) for part in _TYPES for place in _places(files, part)]
    if found[2]:
        return {"checkpoints": checkpoints}
    spec, last = files.spec(), dict[str, list[dict[str, Any]]]()
    for part, kind in _TYPES.items():
        last[part] = [each for each in checkpoints if each["checkpoint_type"] == kind]
    return {
        "training_run_id": files.model_id,
        "base_model": base,
        "model_owner": "local",
        "is_lora": spec.rank > 0,
        "lora_rank": spec.rank or None,
        "last_request_time": _time(files.folder / "state.safetensors"),
        "last_checkpoint": max(last[STATE], key=_when, default=None),
        "last_sampler_checkpoint": max(last[SAMPLER], key=_when, default=None),
        "user_metadata": files.metadata(),
    }


def delete_checkpoint(path: str, find: Callable[[str], ClientFolder], store: Store) -> bool:
    """Delete the checkpoint that a path names; False for another path. WrongRequest where there is none."""
    found = _CHECKPOINT.fullmatch(path)
    if found is None:
        return False
    store.delete_checkpoint(f"tinker://{_client(find, found[1]).model_id}/{found[2]}")
    return True


def _client(find: Callable[[str], ClientFolder], model_id: str) -> ClientFolder:
    files = find(model_id)
    if not files.exists:
        raise UnknownRequest(f"there is no training client '{model_id:.100}' here")
    return files


def _places(files: ClientFolder, part: str) -> list[Path]:
    return sorted(place.parent for place in (files.folder / part).glob("*/checkpoint.json"))


def _checkpoint(files: ClientFolder, part: str, place: Path) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{part}/{place.name}",
        "checkpoint_type": _TYPES[part],
        "time": _time(place / "checkpoint.json"),
        "tinker_path": f"tinker://{files.model_id}/{part}/{place.name}",
        "size_bytes": sum(file.stat().st_size for file in place.iterdir()),
    }


def _time(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat()


def _when(checkpoint: Mapping[str, Any]) -> str:
    return str(checkpoint["time"])
