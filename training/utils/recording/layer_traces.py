"""What each module of a model gave in a recorded step, forward and backward, and each weight around it: layers.json
beside a record. Two runs are compared by it (`threestep audit RUN_A RUN_B`).

Sums over all tokens and ranks, as in digests, so that the layout of the rows changes nothing but rounding. N rows, T
tokens in a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.storage import replace_file
from training.utils.engine.local_pieces import LocalPiece, trained_pieces
from training.utils.recording.hashes import bits
from training.utils.recording.schema import LAYERS
from training.utils.recording.sums import Sums

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine

_FORWARD, _BACKWARD, _BEFORE, _GRADIENT, _AFTER = "forward", "backward", "weights before", "gradient", "weights after"
TRACED = (_BEFORE, _FORWARD, _BACKWARD, _GRADIENT, _AFTER)  # as the data flow


class LayerTrace:
    """Watches the modules of a model while a step runs. name: of the model."""

    def __init__(self, name: str, engine: TrainingEngine) -> None:
        self._name, self._engine, self._sums = name, engine, Sums()
        self._rows: TokenRows | None = None
        self._copies: torch.Tensor | None = None
        self._seen = set[str]()  # in this micro-batch: a layer that is recomputed is called twice
        self._order: dict[str, None] = {}  # of the modules' outputs
        modules = [(place, module) for place, module in engine.module.named_modules() if place]
        self._hooks = [module.register_forward_hook(self._hook(place)) for place, module in modules]
        self._add_weights(_BEFORE, lambda piece: piece.weight)

    def begin(self, rows: TokenRows) -> None:
        """Watch the forward of these rows."""
        self._rows, self._copies = rows, rows.copies_NT()
        self._seen.clear()

    def pause(self) -> None:
        """Watch no forward until `begin`: what is read between micro-batches is not of them."""
        self._rows = None

    def _hook(self, place: str) -> Callable[..., None]:
        def see(module: Any, given: Any, output: Any) -> None:
            found = output[0] if isinstance(output, tuple) and output else output
            if self._copies is None or not isinstance(found, torch.Tensor) or found.shape[:2] != self._copies.shape:
                return
            if not found.is_floating_point():
                return
            if found.requires_grad:
                found.register_hook(lambda gradient: self._add(_BACKWARD, place, gradient, None))
            if self._rows is not None and place not in self._seen:
                self._seen.add(place)
                self._order[place] = None
                self._add(_FORWARD, place, found, self._copies)

        return see

    def _add(self, part: str, place: str, values: torch.Tensor, copies_NT: torch.Tensor | None) -> None:
        """Add the numbers of all tokens. copies_NT: how often each counts; None: once."""
        with torch.no_grad():
            flat = values.detach().flatten(2) if values.dim() > 2 else values.detach().unsqueeze(2)
            wide = flat.double().nan_to_num(0.0, 0.0, 0.0)
            own = bits(flat).long()
            if copies_NT is not None:
                wide, own = wide * copies_NT.unsqueeze(2), own * copies_NT.unsqueeze(2)
            self._sums.add_hashes(f"{part}/{place}", own.sum())
            self._sums.add_floats(f"{part}/{place}", torch.stack([wide.sum(), wide.square().sum()]))

    def _add_weights(self, part: str, of: Callable[[LocalPiece], torch.Tensor | None]) -> None:
        pieces = {piece.name: of(piece) for piece in trained_pieces(self._engine)}
        with torch.no_grad():
            for names in self._engine.parameter_groups:
                for name in names:  # on every rank alike
                    values = pieces.get(name)
                    values = torch.zeros(0) if values is None else values.detach()
                    self._sums.add_hashes(f"{part}/{name}", bits(values).sum(dtype=torch.int64))
                    wide = values.double()
                    self._sums.add_floats(f"{part}/{name}", torch.stack([wide.sum(), wide.square().sum()]))

    def write(self, folder: Path, ranks: Ranks) -> None:
        """Write the sums of all ranks, after the step. A collective."""
        for hook in self._hooks:
            hook.remove()
        self._add_weights(_GRADIENT, lambda piece: piece.moment)
        self._add_weights(_AFTER, lambda piece: piece.weight)
        hashes, floats = self._sums.totals(ranks.device)
        weights = [name for name, _ in self._engine.module.named_parameters()]
        content: dict[str, Any] = {}
        for part in TRACED:
            names = [*self._order] if part in (_FORWARD, _BACKWARD) else weights
            names = names if part != _BACKWARD else names[::-1]
            scale = ranks.world_size if part == _BACKWARD else 1  # `TrainingEngine.backward` undoes a mean over ranks
            content[part] = {
                name: [hashes[place][0], floats[place][0] / scale, floats[place][1] / scale**2]
                for name in names
                if (place := f"{part}/{name}") in hashes
            }
        if ranks.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / _file(self._name), json.dumps(content))


def _file(name: str) -> str:
    return f"{name}_{LAYERS}"


def traced_models(folder: Path) -> Sequence[str]:
    """The models of a record that were traced."""
    return sorted(path.name.removesuffix(f"_{LAYERS}") for path in folder.glob(f"*_{LAYERS}"))
