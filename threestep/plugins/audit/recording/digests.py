"""Digests of every step: digests.jsonl, by which two runs are compared without their data (`threestep audit A B`).

A line for each optimizer step, and one whenever the run begins or is resumed. Each has sums over all ranks: hashes of
what must be equal, and sums of floats for what may differ by rounding. threestep/plugins/audit/README.md has the
format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import training
from threestep.plugins.audit.recording.content import with_losses
from threestep.plugins.audit.recording.hashes import (
    MASK,
    bit_sum,
    end_keys,
    float_hash,
    float_sums,
    mixed,
    random_states_hash,
    target_keys,
    token_keys,
    tokens_hash,
)
from threestep.plugins.audit.recording.layer_traces import LayerTrace
from threestep.plugins.audit.recording.local_pieces import LocalPiece, frozen_pieces, trained_pieces
from threestep.plugins.audit.recording.schema import DIGESTS_VERSION, LAYERS_EVERY
from threestep.plugins.audit.recording.sums import Sums
from training.utils.run.run_folder import RunLog

if TYPE_CHECKING:
    from threestep.plugins.audit.recording.content import StepNumbers
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine

_NOT_COMPARED = ("tokens", "flops")  # figures of speed and layout
_LAYER = re.compile(r"^(.*?\.\d+)\.")


def layer_of(name: str) -> str:
    """The layer of a weight: its name up to its number, or the module that holds it."""
    name = name.removeprefix("model.")  # of `token_model`, around the model of transformers
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0] or name


@dataclass
class DigestLog:
    """digests.jsonl of a run. program: the one that trains, as `python -m` takes it."""

    path: Path
    program: str = ""
    layers: dict[str, list[str]] = field(default_factory=dict, compare=False)  # of each model
    _beginning: list[str] = field(default_factory=list, compare=False)  # models whose sums are not written yet
    _begin: Sums | None = field(default_factory=Sums, compare=False)
    _log: RunLog | None = field(default=None, compare=False)

    def begin(self, name: str, engine: TrainingEngine) -> None:
        """Sum the weights with which the run begins or goes on, at the first call for the model `name`: that of an
        actor comes later than the critic's with `--critic_warmup`."""
        if name in self.layers:
            return
        self._begin = self._begin or Sums()
        self._beginning.append(name)
        layers = self.layers[name] = [*dict.fromkeys(layer_of(each) for each, _ in engine.module.named_parameters())]
        with torch.no_grad():
            pieces = [*trained_pieces(engine), *frozen_pieces(engine)]
            self._begin.add_floats(f"{name}/sums", _by_layer(pieces, layers, [each.weight.sum() for each in pieces]))
            squares = [each.weight.double().square().sum() for each in pieces]
            self._begin.add_floats(f"{name}/squares", _by_layer(pieces, layers, squares))
            self._begin.add_hashes(name, _weight_hashes(pieces, layers))

    def write(self, ranks: Ranks, step: int, line: Mapping[str, Any]) -> None:
        """Append the line of a step, and before the first one that of the beginning. A collective then."""
        lines = [line]
        if self._begin is not None:
            lines.insert(0, self._first_line(ranks, step))
            self._begin = None
            self._beginning.clear()
        if ranks.is_main:
            self._log = self._log or RunLog(self.path)
            self._log.append(json.dumps(each, separators=(",", ":")) for each in lines)

    def _first_line(self, ranks: Ranks, step: int) -> dict[str, Any]:
        assert self._begin is not None
        hashes, floats = self._begin.totals(ranks.device)
        weights = {}
        for name in self._beginning:
            layers = self.layers[name]
            norms = [_short(math.sqrt(squares)) for squares in floats[f"{name}/squares"]]
            own = zip(hashes[name], map(_short, floats[f"{name}/sums"]), norms, strict=True)
            weights[name] = dict(zip(layers, map(list, own), strict=True))
        about = {"version": training.__version__, "program": self.program, "ranks": ranks.world_size}
        return {"digests": DIGESTS_VERSION, "begins_after": step - 1, **about, "weights": weights}


class StepDigest:
    """The digest of one optimizer step. update: its number in step 3's rollout."""

    def __init__(
        self, log: DigestLog, ranks: Ranks, step: int, *, update: int | None, record: Path | None = None
    ) -> None:
        """record: the folder of the step's record, which gets the traces of the layers; None without one."""
        self._log, self._ranks, self._step, self._update = log, ranks, step, update
        self._record, self._traces = record, dict[str, LayerTrace]()
        self._sums, self._hooks = Sums(), list[Any]()
        self._engines: dict[str, TrainingEngine] = {}
        self._read: torch.Tensor | None = None
        self._sums.add_hashes("random", _as_int64(random_states_hash(ranks.rank)))

    def watched(self, trainee: Trainee) -> Trainee:
        """Return the model in training, whose micro-batches are watched."""
        name, engine = trainee.group, trainee.engine
        self._log.begin(name, engine)
        self._engines[name] = engine
        self._hooks.append(engine.module.register_forward_hook(self._keep))
        if self._record is not None:
            self._traces[name] = LayerTrace(name, engine)
        return with_losses(trainee, partial(self._watch, name))

    def _keep(self, module: Any, given: Any, output: Any) -> None:
        read = getattr(output, "logprobs_M", output)
        self._read = read.detach() if isinstance(read, torch.Tensor) else None

    def _watch(self, name: str, micro_batch: MicroBatch) -> MicroLoss:
        self._read, trace = None, self._traces.get(name)
        if trace is not None:
            trace.begin(micro_batch.rows)
        found = micro_batch.loss()
        if trace is not None:
            trace.pause()
        with torch.no_grad():
            rows = micro_batch.rows
            keys_NT = token_keys(rows)
            keys_M = target_keys(rows, keys_NT)
            self._sums.add_hashes(f"{name}/ids", tokens_hash(rows, keys_NT))
            self._sums.add_hashes(f"{name}/targets", keys_M.sum())
            self._sums.add_floats(f"{name}/loss", found.loss)
            if self._read is not None:
                self._add_read(name, rows, self._read.reshape(-1), (keys_NT, keys_M))
        self._read = None
        return found

    def _add_read(
        self, name: str, rows: TokenRows, read: torch.Tensor, keys_of: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Add log-probabilities of targets, or scores of sequences. keys_of: all tokens [N, T], and targets [M]."""
        keys_NT, keys_M = keys_of
        keys = keys_M if len(read) == len(keys_M) else end_keys(rows, keys_NT)
        keys = keys if len(read) == len(keys) else torch.zeros(len(read), dtype=torch.int64, device=read.device)
        self._add(f"{name}/{'logprobs' if keys is keys_M else 'scores'}", read, keys)

    def _add(self, name: str, values: torch.Tensor, keys: torch.Tensor) -> None:
        self._sums.add_hashes(name, float_hash(values, keys))
        self._sums.add_floats(name, float_sums(values, keys))

    def write(self, numbers: StepNumbers) -> None:
        """Append the line of the step, after it. A collective."""
        for hook in self._hooks:
            hook.remove()
        rows = torch.tensor([*numbers.rows], dtype=torch.int64, device=self._ranks.device)
        with torch.no_grad():
            self._sums.add_hashes("rows", mixed(rows + 1).sum())
            for name, values in numbers.tensors().items():
                self._add_tensor(name, values.reshape(-1))
            for name, engine in self._layered.items():
                self._add_layers(name, engine)
        if self._record is not None:
            for trace in self._traces.values():
                trace.write(self._record, self._ranks)
        hashes, floats = self._sums.totals(self._ranks.device)
        self._log.write(self._ranks, self._step, self._line(hashes, floats, numbers.figures))

    @property
    def _layered(self) -> Mapping[str, TrainingEngine]:
        """The models whose layers are summed after this step: this costs passes over all weights and moments."""
        has = self._step == 1 or self._step % LAYERS_EVERY == 0 or self._record is not None
        return self._engines if has else {}

    def _add_tensor(self, name: str, values: torch.Tensor) -> None:
        """Add numbers that are the same in any order."""
        if values.is_floating_point():
            self._add(name, values, torch.zeros(len(values), dtype=torch.int64, device=values.device))
        else:
            self._sums.add_hashes(name, mixed(values.to(torch.int64)).sum())

    def _add_layers(self, name: str, engine: TrainingEngine) -> None:
        pieces, layers = [*trained_pieces(engine)], self._log.layers[name]
        self._sums.add_floats(f"{name}/weights", _by_layer(pieces, layers, [each.weight.sum() for each in pieces]))
        self._sums.add_hashes(f"{name}/weights", _weight_hashes(pieces, layers))
        moved = [each for each in pieces if each.moment is not None]
        norms = torch._foreach_norm([each.moment for each in moved if each.moment is not None]) if moved else []
        self._sums.add_floats(f"{name}/gradients", _by_layer(moved, layers, [norm.double() ** 2 for norm in norms]))

    def _line(
        self, hashes: Mapping[str, list[str]], floats: Mapping[str, list[float]], figures: Mapping[str, float]
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"step": self._step, **({} if self._update is None else {"update": self._update})}
        weights = {f"{name}/weights" for name in self._engines}
        line["hashes"] = {name: values[0] for name, values in hashes.items() if name not in weights}
        line["floats"] = {
            name: [*map(_short, values)]
            for name, values in floats.items()
            if name not in weights and not name.endswith("/gradients")
        }
        line["figures"] = {
            name: _short(value) for name, value in figures.items() if name.rpartition("/")[2] not in _NOT_COMPARED
        }
        for name in self._layered:
            layers, place = self._log.layers[name], f"{name}/weights"
            norms = [_short(math.sqrt(squares)) for squares in floats[f"{name}/gradients"]]
            line.setdefault("gradients", {})[name] = dict(zip(layers, norms, strict=True))
            pairs = zip(hashes[place], map(_short, floats[place]), strict=True)
            line.setdefault("weights", {})[name] = dict(zip(layers, map(list, pairs), strict=True))
        return line


def _by_layer(pieces: Sequence[LocalPiece], layers: Sequence[str], numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [layers]: the sums of the pieces' numbers, [] each, by layer, in float64 or int64."""
    if not numbers:
        return torch.zeros(len(layers), dtype=torch.float64)
    stacked = torch.stack([*numbers])
    stacked = stacked.double() if stacked.is_floating_point() else stacked
    index = {layer: place for place, layer in enumerate(layers)}
    places = torch.tensor([index[layer_of(piece.name)] for piece in pieces], device=stacked.device)
    return stacked.new_zeros(len(layers)).index_add_(0, places, stacked)


def _weight_hashes(pieces: Sequence[LocalPiece], layers: Sequence[str]) -> torch.Tensor:
    found = _by_layer(pieces, layers, [bit_sum(piece.weight) for piece in pieces])
    return found if found.dtype == torch.int64 else found.long()


def _as_int64(value: int) -> torch.Tensor:
    return torch.tensor([(value & MASK) - (1 << 64 if value >> 63 & 1 else 0)], dtype=torch.int64)


def _short(value: float) -> float | None:
    return float(f"{value:.12g}") if math.isfinite(value) else None
