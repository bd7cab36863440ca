"""State of clients on disk, so that a server that is killed goes on where it was.

    OUTPUT_DIR/base.json                       the base model, which a restart has to have again
    OUTPUT_DIR/sessions/SESSION/session.json
    .../sampler_2.json                         a sampling session: its weights
    .../train_0/client.json                    a training client: its adapters' description
    .../train_0/state.safetensors              weights, moments and gradient behind the request `seq` in its metadata
    .../train_0/requests/00000012.pb           requests that were accepted and are not in the state
    .../train_0/results/00000012.pb            answers, the last ones of which are kept
    .../train_0/weights/NAME/                  of save_state: the same file
    .../train_0/sampler_weights/NAME/          of save_weights_for_sampler: a folder as PEFT writes it, or a model's

A file is written beside its place and renamed, so that it is whole or not there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors.torch import save_file

from threestep.plugins.tinker.client_state import ClientState
from threestep.plugins.tinker.records import PARTS, LoraSpec, UnknownRequest, WrongRequest
from training.utils.base.errors import ThreestepError
from training.utils.base.reading import checked_json, read_bytes, read_text, torch_tensors
from training.utils.base.storage import publish_folder, remove, replace_file

if TYPE_CHECKING:
    import torch

    from threestep.plugins.tinker.adapters import WeightLayout

KEPT_RESULTS = 512  # of a client: a result that was not fetched while so many others came is gone
KEPT_SNAPSHOTS = 32  # of a client: unnamed weights for sampling
STATE, SAMPLER = "weights", "sampler_weights"  # folders of checkpoints, and words of their addresses
_SNAPSHOT = "snapshot-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_ADDRESS = re.compile(rf"tinker://([0-9a-f]{{32}}):train:([0-9]{{1,9}})/({STATE}|{SAMPLER})/({_NAME.pattern})")
_RUN = re.compile(r"training_runs/([^/]+)(/checkpoints)?")
_CHECKPOINT = re.compile(r"training_runs/([^/]+)/checkpoints/([^/]+/[^/]+)")
_TYPES = {STATE: "training", SAMPLER: "sampler"}  # words of the client's lists
_VECTORS = ("weights", "first", "second")
_REQUEST = re.compile(r"([0-9]{8,18})\.([a-z_]+)\.(pb|json)")
_MOST = 10**18  # of a request's number and of steps


@dataclass(frozen=True)
class _CheckpointAbout:
    spec: LoraSpec


@dataclass(frozen=True)
class _SamplerAbout:
    path: str | None


class StoredMessage(NamedTuple):
    """A request or an answer. kind: of the request. is_proto: the body is protobuf, otherwise JSON."""

    body: bytes
    is_proto: bool
    kind: str = ""


class ClientFolder:
    """The files of one training client."""

    def __init__(self, folder: Path, model_id: str) -> None:
        self.folder, self.model_id = folder, model_id

    @property
    def exists(self) -> bool:
        return os.path.lexists(self.folder / "client.json")

    def create(
        self, spec: LoraSpec, state: ClientState, answer: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Write the client's first state, the answer to its creation, and last its description. metadata: the
        client's own words."""
        for part in ("requests", "results"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        self.write_state(state, 0, answer)
        self.write_result(0, StoredMessage(json.dumps(dict(answer)).encode(), is_proto=False))
        replace_file(self.folder / "client.json", json.dumps({**asdict(spec), "metadata": metadata}))

    def spec(self) -> LoraSpec:
        """Read the description."""
        path = self.folder / "client.json"
        return _checked(checked_json(LoraSpec, read_text(path), path), path)

    def metadata(self) -> dict[str, str] | None:
        """Return the client's own words."""
        path = self.folder / "client.json"
        known = checked_json(dict[str, Any], read_text(path), path).get("metadata")
        return {str(name): str(value) for name, value in known.items()} if isinstance(known, dict) else None

    def write_state(self, state: ClientState, seq: int, answer: Mapping[str, Any] | None = None) -> None:
        """Write the state behind request `seq`, with the answer to it where nothing else repeats that, and forget the
        requests that it contains."""
        beside = self.folder / f".state.{os.getpid()}"
        _save_state(beside, state, {"seq": str(seq), "answer": json.dumps(answer)})
        os.replace(beside, self.folder / "state.safetensors")
        for number, _, path in self._kept():
            if number <= seq:
                remove(path)

    def read_state(self, layout: WeightLayout) -> tuple[ClientState, int, Mapping[str, Any] | None]:
        """Return the state, the number of its last request, and the answer to it."""
        path = self.folder / "state.safetensors"
        state, notes = _load_state(path, layout)
        answer = checked_json(dict[str, Any] | None, notes.get("answer", ""), f"{path}, answer")
        return state, _number(notes, "seq", path), answer

    def write_request(self, seq: int, message: StoredMessage) -> None:
        """Keep a request until the state contains it."""
        replace_file(self._path("requests", seq, f"{message.kind}.{_ending(message)}"), message.body)

    def requests(self) -> dict[int, StoredMessage]:
        """Return all that are kept, by their numbers, ascending."""
        kept = ((seq, StoredMessage(read_bytes(path), path.suffix == ".pb", kind)) for seq, kind, path in self._kept())
        return dict(sorted(kept))

    def write_result(self, seq: int, message: StoredMessage) -> None:
        """Keep an answer, and forget old ones."""
        replace_file(self._path("results", seq, _ending(message)), message.body)
        for ending in ("pb", "json"):
            remove(self._path("results", seq - KEPT_RESULTS, ending))

    def result(self, seq: int) -> StoredMessage | None:
        """Return an answer; None if there is none, or none any more."""
        for is_proto, ending in ((True, "pb"), (False, "json")):
            path = self._path("results", seq, ending)
            if not os.path.lexists(path):
                continue
            body = read_bytes(path)
            if not is_proto:
                checked_json(dict[str, Any], read_text(path), path)
            return StoredMessage(body, is_proto)
        return None

    def _path(self, part: str, seq: int, ending: str) -> Path:
        return self.folder / part / f"{seq:08d}.{ending}"

    def _kept(self) -> list[tuple[int, str, Path]]:
        """Number, kind and file of requests."""
        paths = (self.folder / "requests").iterdir() if (self.folder / "requests").is_dir() else ()
        return [(int(found[1]), found[2], path) for path in paths if (found := _REQUEST.fullmatch(path.name))]

    # --- checkpoints

    def save_checkpoint(self, name: str, state: ClientState, seq: int, overwrite: bool) -> str:
        """Write weights and moments under a name; return the address. WrongRequest for a name that is taken."""
        spec = self.spec()

        def write(beside: Path) -> None:
            kept = replace(state, gradient_P=None)
            _save_state(beside / "state.safetensors", kept, {"seq": str(seq), "answer": "null"})

        return self._publish(STATE, name, {"seq": seq, "spec": asdict(spec)}, overwrite=overwrite, write=write)

    def save_weights(
        self, name: str | None, weights_P: torch.Tensor, layout: WeightLayout, *, seq: int, base: str
    ) -> str:
        """Write weights alone, as their layout does; return the address. name None: an unnamed checkpoint, of which
        the last ones are kept."""
        about = {"seq": seq, "spec": asdict(self.spec())}

        def write(beside: Path) -> None:
            layout.write(beside, weights_P, base)

        if name is not None:
            return self._publish(SAMPLER, name, about, overwrite=True, write=write)
        address = self._publish(SAMPLER, f"{_SNAPSHOT}{seq:08d}", about, overwrite=True, write=write)
        for path in sorted((self.folder / SAMPLER).glob(f"{_SNAPSHOT}*"))[:-KEPT_SNAPSHOTS]:
            remove(path)
        return address

    def _publish(self, part: str, name: str, about: dict[str, Any], *, overwrite: bool, write: Any) -> str:
        if _NAME.fullmatch(name) is None:
            raise WrongRequest(
                f"a checkpoint's name may have at most 200 letters, digits, '.', '_' and '-', got '{name:.60}'"
            )
        folder = self.folder / part / name
        if folder.exists() and not overwrite:
            known = checked_json(dict[str, Any], read_text(folder / "checkpoint.json"), folder / "checkpoint.json")
            if known != json.loads(json.dumps(about)):  # else it is this request's own, from before a restart
                raise WrongRequest(f"checkpoint '{name}' already exists; give another name, or overwrite=True")
        else:
            beside = folder.parent / f".{name}.{os.getpid()}"
            remove(beside)
            beside.mkdir(parents=True)
            write(beside)
            (beside / "checkpoint.json").write_text(json.dumps(about), encoding="utf-8")
            publish_folder(beside, folder)
        return f"tinker://{self.model_id}/{part}/{name}"


class Store:
    """The folder of a server."""

    def __init__(self, folder: Path, base: Mapping[str, str]) -> None:
        """base: what has to be the same when the server starts again. ThreestepError if it is not."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "base.json"
        if not os.path.lexists(path):
            replace_file(path, json.dumps(dict(base)))
        known: dict[str, Any] = checked_json(dict[str, Any], read_text(path), path)
        for name, value in base.items():
            if known.get(name) != value:
                raise ThreestepError(
                    f"'{folder}' holds clients from a server with {name} '{known.get(name)}', but this one has "
                    f"'{value}'; start the server with '{known.get(name)}' again, or choose another --output_dir"
                )

    def open_session(self, session: str, about: Mapping[str, Any]) -> None:
        """Write a session."""
        folder = self._folder / "sessions" / session
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "session.json", json.dumps(dict(about)))

    def has_session(self, session: str) -> bool:
        return (self._folder / "sessions" / session / "session.json").is_file()

    def client(self, session: str, number: int) -> ClientFolder:
        """Return the folder of a training client, which may not exist yet."""
        return ClientFolder(self._folder / "sessions" / session / f"train_{number}", f"{session}:train:{number}")

    def write_sampler(self, session: str, number: int, weights: Mapping[str, Any]) -> None:
        """Write a sampling session."""
        replace_file(self._folder / "sessions" / session / f"sampler_{number}.json", json.dumps(dict(weights)))

    def sampler(self, session: str, number: int) -> dict[str, Any] | None:
        """Read a sampling session; None if there is none."""
        path = self._folder / "sessions" / session / f"sampler_{number}.json"
        return asdict(checked_json(_SamplerAbout, read_text(path), path)) if os.path.lexists(path) else None

    def delete_checkpoint(self, address: str) -> None:
        """Remove a checkpoint. WrongRequest if there is none."""
        remove(self.checkpoint(address)[0])

    def checkpoint(self, address: str) -> tuple[Path, LoraSpec]:
        """Return the folder of a checkpoint and the description of its adapters. WrongRequest if there is none."""
        found = _ADDRESS.fullmatch(address)
        if found is not None:
            session, number, part, name = found.groups()
            folder = self.client(session, int(number)).folder / part / name
            about = folder / "checkpoint.json"
            if os.path.lexists(about):
                return folder, _checked(checked_json(_CheckpointAbout, read_text(about), about).spec, about)
        raise WrongRequest(f"this server has no weights '{address:.200}'; give an address that a save returned")


# --- lists of clients and checkpoints


def run_page(path: str, find: Callable[[str], ClientFolder], base: str) -> dict[str, Any] | None:
    """Answer a GET of a client or its checkpoints; None for another path. UnknownRequest for no client."""
    found = _RUN.fullmatch(path)
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
        raise UnknownRequest(f"there is no training client '{model_id:.100}' on this server")
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


# --- files


def load_checkpoint(folder: Path, layout: WeightLayout) -> ClientState:
    """Read the state of a checkpoint. One for sampling has no moments: they begin at 0."""
    if folder.parent.name == STATE:
        return _load_state(folder / "state.safetensors", layout)[0]
    return ClientState.new(layout.read(folder))


def load_weights(folder: Path, layout: WeightLayout) -> torch.Tensor:
    """Read the weights of a checkpoint, [P]."""
    if folder.parent.name == STATE:
        return _load_vectors(folder / "state.safetensors", layout, _VECTORS[:1])[0]["weights"]
    return layout.read(folder)


def _checked(spec: LoraSpec, path: Path) -> LoraSpec:
    if spec.rank < 0 or not {*spec.parts} <= {*PARTS}:
        raise ThreestepError(f"{path} must have a non-negative rank and parts from {', '.join(PARTS)}")
    return spec


def _ending(message: StoredMessage) -> str:
    return "pb" if message.is_proto else "json"


def _save_state(path: Path, state: ClientState, notes: dict[str, str]) -> None:
    tensors = {"weights": state.weights_P, "first": state.first_P, "second": state.second_P}
    if state.gradient_P is not None:
        tensors["gradient"] = state.gradient_P
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={**notes, "steps": str(state.steps)})


def _load_vectors(
    path: Path, layout: WeightLayout, names: Sequence[str], others: Sequence[str] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors, notes = torch_tensors(path, names, others)
    kinds = {vector.dtype for vector in tensors.values()}
    if any(vector.shape != (layout.size,) or not vector.is_floating_point() for vector in tensors.values()):
        raise ThreestepError(f"{path} must have vectors of {layout.size:,} floats, the number that this client trains")
    if len(kinds) > 1:
        raise ThreestepError(f"{path} must have vectors of a single type, got {', '.join(sorted(map(str, kinds)))}")
    return tensors, notes


def _load_state(path: Path, layout: WeightLayout) -> tuple[ClientState, dict[str, str]]:
    found, notes = _load_vectors(path, layout, _VECTORS, ("gradient",))
    weights_P, first_P, second_P = (found[name] for name in _VECTORS)
    return ClientState(weights_P, first_P, second_P, found.get("gradient"), _number(notes, "steps", path)), notes


def _number(notes: Mapping[str, str], name: str, path: Path) -> int:
    found: int = checked_json(int, notes.get(name, ""), f"{path}, {name}")
    if not 0 <= found < _MOST:
        raise ThreestepError(f"{path}: {name} must be a number from 0 to {_MOST - 1}, got {found!s:.20}")
    return found
