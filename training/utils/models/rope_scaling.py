"""Rotary positions beyond those that a model has (`--rope_scaling`): its configuration is changed before it loads, and
saved with it.

By position interpolation (Chen et al. 2023, arXiv:2306.15595), or YaRN (Peng et al. 2023, arXiv:2309.00071), as
transformers computes them. Types whose angles depend on how long a row is are left out: one document would change
others. Cheap to import.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

KINDS = ("linear", "yarn")


class RopeScaling(NamedTuple):
    """kind: of KINDS. factor: by which positions are multiplied."""

    kind: str
    factor: float


def read_scaling(text: str) -> RopeScaling:
    """Return the scaling that `--rope_scaling` gives, e.g. yarn:4; raise ThreestepError for other text."""
    kind, _, number = text.partition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if kind not in KINDS or not 1 < factor < math.inf:
        raise ThreestepError(
            f"--rope_scaling expects a type ({', '.join(KINDS)}) and a factor above 1, such as yarn:4, got '{text}'"
        )
    return RopeScaling(kind, factor)


def scaled_positions(config: Any) -> int | None:
    """Return the positions that a configuration of text has, None if it names none. YaRN has its factor times those
    before, also where `max_position_embeddings` still counts these, as in Qwen2.5's instructions for long texts."""
    positions: int | None = getattr(config, "max_position_embeddings", None)
    for rope in _kinds_of_rope(config):
        before, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if positions is not None and rope.get("rope_type") == "yarn" and before and factor:
            positions = max(positions, int(before * factor))
    return positions


def steady_positions(config: Any) -> int | None:
    """Return the tokens up to which the angles of a configuration of text do not depend on the longest sequence of a
    batch; None without a bound. LongRoPE (Phi-3) takes others beyond it, for all sequences of the batch."""
    bounds = [
        rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for rope in _kinds_of_rope(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(filter(None, bounds), default=None)


def _kinds_of_rope(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of all layers, or of each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]


def check_scaling(mistakes: Mistakes, text: str | None) -> None:
    """Note a text that `read_scaling` does not read."""
    if text is not None:
        mistakes.note(read_scaling, text)


def scaled(config: Any, text: str | None, name: str) -> Any:
    """Return a transformers configuration with the positions that the scaling gives, or unchanged for None.

    name: of the model, for errors: one whose positions are not rotary, or are scaled already
    """
    if text is None:
        return config
    kind, factor = read_scaling(text)
    changed = copy.deepcopy(config)
    text_config = changed.get_text_config()
    rope, positions = (
        getattr(text_config, "rope_parameters", None),
        getattr(text_config, "max_position_embeddings", None),
    )
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_type"), str) or positions is None:
        raise ThreestepError(
            f"--rope_scaling {text} is for models with one kind of rotary positions, but '{name}' "
            f"({config.model_type}) has none or several; remove --rope_scaling"
        )
    if rope["rope_type"] != "default":
        raise ThreestepError(
            f"--rope_scaling {text}: the positions of '{name}' are already scaled ({rope['rope_type']}, {positions:,} "
            "of them); remove it, or start from the unscaled model"
        )
    own = {"original_max_position_embeddings": positions} if kind == "yarn" else {}
    text_config.rope_parameters = {**rope, "rope_type": kind, "factor": factor, **own}
    text_config.max_position_embeddings = int(positions * factor)
    return changed
