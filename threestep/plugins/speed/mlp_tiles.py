"""MLPs in tiles along the row: the inner activations of one tile are in memory at a time.

An MLP computes each token alone. Each tile is computed again in the backward, so that an MLP keeps its input alone
(Bekman et al. 2025, "Arctic Long Sequence Training", arXiv:2506.13996). The MLPs of a model are found by what its
layers call, and the tiles compared with the model's own numbers.

N rows, T tokens in a row (or a slice of it), H hidden size, K tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError
from training.utils.models.families import language_part
from training.utils.models.own_forward import IN_PIECES, WITHOUT_CACHE, current_difference, own_forward_of
from training.utils.models.weights import whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TiledMlp:
    """The forward of `mlp` in `tiles` tiles, their number the same for any row: ZeRO-3 gathers for each of them on
    every rank. Rows behind a cache, as in rollouts, are computed whole."""

    def __init__(self, mlp: nn.Module, tiles: int) -> None:
        self.whole: Callable[[torch.Tensor], torch.Tensor] = mlp.forward
        self.tiles, self.has_cache = tiles, False

    def __call__(self, hidden_NTH: torch.Tensor) -> torch.Tensor:
        if self.has_cache:
            return self.whole(hidden_NTH)
        tokens = hidden_NTH.shape[1]
        if tokens < self.tiles:
            hidden_NTH = functional.pad(hidden_NTH, (0, 0, 0, self.tiles - tokens))
        least, more = divmod(hidden_NTH.shape[1], self.tiles)
        parts = hidden_NTH.split([least + 1] * more + [least] * (self.tiles - more), dim=1)
        return torch.cat([checkpoint(self._tile, part, use_reentrant=False) for part in parts], dim=1)[:, :tokens]

    def _tile(self, part: torch.Tensor) -> torch.Tensor:
        return self.whole(part.contiguous())

    def look_for_cache(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward of the layer, a recomputed one too."""
        self.has_cache = any(isinstance(each, Cache) for each in (*args, *kwargs.values()))


def tile_mlps(model: PreTrainedModel, tiles: int) -> None:
    """Compute every MLP of a loaded model in `tiles` tiles, in place. A collective under ZeRO-3.

    Raises ThreestepError for a model whose MLPs are not found, or whose numbers would be others.
    """
    setattr(model, IN_PIECES, "--mlp_tiles")
    if is_tiled(model):
        return
    own = own_forward_of(model)
    if own is None:
        raise ThreestepError(
            f"--mlp_tiles {tiles} compares {type(model).__name__} with its own untiled numbers, but these were not "
            "measured on loading; pass a model folder, or leave --mlp_tiles out"
        )
    found = mlps_of(model, tiles, lambda: current_difference(model, own))
    for layer, mlps in found.items():
        for mlp in mlps:
            tiled = TiledMlp(mlp, tiles)
            mlp.forward = tiled  # type: ignore[assignment]
            layer.register_forward_pre_hook(tiled.look_for_cache, with_kwargs=True)
    setattr(model, WITHOUT_CACHE, True)
    difference = current_difference(model, own)
    if not difference <= own.tolerance:
        raise ThreestepError(
            f"--mlp_tiles {tiles}: {type(model).__name__} computes different results when tiled: its "
            f"log-probabilities or scores change by {difference:.2g}, but rounding accounts for only "
            f"{own.tolerance:.2g}; leave --mlp_tiles out"
        )
    log_on_main(
        f"{type(model).__name__}: computing {sum(map(len, found.values()))} MLPs in {tiles} tiles along the row"
    )


def is_tiled(model: nn.Module) -> bool:
    """Return whether `tile_mlps` changed the model."""
    return any(isinstance(vars(module).get("forward"), TiledMlp) for module in model.modules())


def refuse_noise(model: nn.Module) -> None:
    """ThreestepError for tiled MLPs that draw noise in training where a tile cannot take it."""
    for part in model.modules():
        if isinstance(vars(part).get("forward"), TiledMlp) and getattr(part, "jitter_noise", False):
            raise ThreestepError(
                f"--mlp_tiles: {type(part).__name__} multiplies its input by noise in place, and tiles share that "
                "input; set --dropout 0, or leave --mlp_tiles out"
            )


def mlps_of(model: PreTrainedModel, tiles: int, read: Callable[[], Any]) -> dict[nn.Module, list[nn.Module]]:
    """Return the MLPs of each layer of the language model: its parts with two matrices and more that it calls with the
    tokens' states alone, and that return as many states. read: runs a forward.

    Raises ThreestepError if a layer has none. tiles: for the sentence
    """
    layers = [part for part in language_part(model).modules() if isinstance(part, GradientCheckpointingLayer)]
    found: dict[nn.Module, list[nn.Module]] = {layer: [] for layer in layers}
    owners = {part: layer for layer in layers for part in layer.children() if _has_matrices(part)}

    def look(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        is_alone = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].dim() == 3
        of_layer = found[owners[part]]
        if is_alone and isinstance(output, torch.Tensor) and output.shape == args[0].shape and part not in of_layer:
            of_layer.append(part)

    hooks = [part.register_forward_hook(look, with_kwargs=True) for part in owners]
    try:
        read()
    finally:
        for hook in hooks:
            hook.remove()
    without = next((layer for layer, mlps in found.items() if not mlps), model if not layers else None)
    if without is not None:
        raise ThreestepError(
            f"--mlp_tiles {tiles}: no submodule of {type(without).__name__} in {type(model).__name__} takes only the "
            "tokens' hidden states and returns the same number of them, as an MLP does; leave --mlp_tiles out"
        )
    return found


def _has_matrices(part: nn.Module) -> bool:
    return sum(len(whole_shape(weight)) > 1 for weight in part.parameters()) > 1


def tokens_of_tile(tokens: int, tiles: int) -> int:
    """Return how many of a row's tokens the largest tile has."""
    return max(1, math.ceil(tokens / tiles))
