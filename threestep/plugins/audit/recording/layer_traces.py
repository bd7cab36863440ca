"""Outputs of each module of a model in a recorded step, forward and backward, and each weight around it, as sums: a
file beside the record for each rank. Two runs are compared by them (`threestep audit RUN_A RUN_B`).

The sums are over all tokens, each counted for every sequence that holds it: over all ranks the layout of the rows
changes nothing but rounding. N rows, T tokens in a row.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.audit.recording.hashes import bits
from threestep.plugins.audit.recording.local_pieces import LocalPiece, trained_pieces
from threestep.plugins.audit.recording.schema import TRACED, layers_file
from threestep.plugins.audit.recording.sums import Sums
from training.utils.base.storage import replace_file

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine

_BEFORE, _FORWARD, _BACKWARD, _OWN, _MOMENT, _AFTER = TRACED


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
        for own, weight in engine.module.named_parameters():
            if weight.requires_grad:
                self._hooks.append(weight.register_hook(partial(self._add, _OWN, own)))
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
                found.register_hook(partial(self._add, _BACKWARD, place))
            if self._rows is not None and place not in self._seen:
                self._seen.add(place)
                self._order[place] = None
                self._add(_FORWARD, place, found, self._copies)

        return see

    def _add(self, part: str, place: str, values: torch.Tensor, copies_NT: torch.Tensor | None = None) -> None:
        """Add numbers. copies_NT: how often those of each token count; None: once."""
        with torch.no_grad():
            wide, own = values.detach().double().nan_to_num(0.0, 0.0, 0.0), bits(values).long()
            if copies_NT is not None:
                counts = copies_NT.view(*copies_NT.shape, *[1] * (values.dim() - 2))
                wide, own = wide * counts, own * counts
            self._sums.add_hashes(f"{part}/{place}", own.sum())
            self._sums.add_floats(f"{part}/{place}", torch.stack([wide.sum(), wide.square().sum()]))

    def _add_weights(self, part: str, of: Callable[[LocalPiece], torch.Tensor | None]) -> None:
        for piece in trained_pieces(self._engine):
            values = of(piece)
            if values is not None:
                self._add(part, piece.name, values)

    def write(self, folder: Path, ranks: Ranks) -> None:
        """Write this rank's sums, after the step."""
        for hook in self._hooks:
            hook.remove()
        self._add_weights(_MOMENT, lambda piece: piece.moment)
        self._add_weights(_AFTER, lambda piece: piece.weight)
        hashes, floats = self._sums.own()
        weights = [name for name, _ in self._engine.module.named_parameters()]
        content: dict[str, Any] = {}
        for part in TRACED:
            names = [*self._order] if part in (_FORWARD, _BACKWARD) else weights
            names = names[::-1] if part in (_BACKWARD, _OWN) else names
            # `TrainingEngine.backward` undoes a mean over the ranks.
            scale = ranks.world_size if part in (_BACKWARD, _OWN) else 1
            content[part] = {
                name: [hashes[place][0], floats[place][0] / scale, floats[place][1] / scale**2]
                for name in names
                if (place := f"{part}/{name}") in hashes
            }
        with contextlib.suppress(OSError):  # the recorder has said that the disk refuses
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / layers_file(self._name, ranks.rank), json.dumps(content))
