"""Hashes and sums by name, over all ranks in one collective."""

from __future__ import annotations

import torch

from threestep.plugins.audit.recording.hashes import MASK
from training.utils.engine.ranks.collectives import summed


class Sums:
    """Hashes and sums of this rank by name, [K] each, on the device until they are read. Every rank has the same
    names."""

    def __init__(self) -> None:
        self._hashes: dict[str, torch.Tensor] = {}
        self._floats: dict[str, torch.Tensor] = {}

    def add_hashes(self, name: str, values: torch.Tensor) -> None:
        """values: int64; sums wrap around."""
        own = values.detach().reshape(-1)
        self._hashes[name] = self._hashes[name] + own if name in self._hashes else own

    def add_floats(self, name: str, values: torch.Tensor) -> None:
        own = values.detach().double().reshape(-1)
        self._floats[name] = self._floats[name] + own if name in self._floats else own

    def own(self) -> tuple[dict[str, list[str]], dict[str, list[float]]]:
        """As `totals`, of this rank alone."""
        hashes = {name: [f"{each & MASK:016x}" for each in values.tolist()] for name, values in self._hashes.items()}
        return hashes, {name: values.tolist() for name, values in self._floats.items()}

    def totals(self, device: torch.device) -> tuple[dict[str, list[str]], dict[str, list[float]]]:
        """Hashes in hex, and floats, over all ranks. One collective in float64, hashes in halves: their sums are exact
        for two million ranks."""
        hashes, floats = ([sums[name].to(device) for name in sorted(sums)] for sums in (self._hashes, self._floats))
        halves = [(part >> shift & 0xFFFFFFFF).double() for shift in (0, 32) for part in hashes]
        whole = iter(summed(torch.cat([*halves, *floats, torch.zeros(1, device=device).double()])).tolist())
        low, high = ([[next(whole) for _ in part] for part in hashes] for _ in range(2))
        found = {
            name: [f"{(int(a) + (int(b) << 32)) & MASK:016x}" for a, b in zip(*parts, strict=True)]
            for name, *parts in zip(sorted(self._hashes), low, high, strict=True)
        }
        return found, {
            name: [next(whole) for _ in part] for name, part in zip(sorted(self._floats), floats, strict=True)
        }
