"""A head in a model's folder: MODEL/mtp/model.safetensors and config.json.

A folder of its own, because transformers reads the files of the model's alone, and says nothing of it; heads under the
names of public checkpoints are `public_names`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import parse_json

if TYPE_CHECKING:
    import torch

    from threestep.plugins.mtp.head import MtpHead

FOLDER = "mtp"
FINAL_NORM = ".trunk.norm.weight"  # of a module; a head of `final_norm=False` has none
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_FORMAT = 1


def save_head(folder: Path, layers: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write a head into `folder`, a model's. tensors: whole, on the CPU."""
    from safetensors.torch import save_file

    own = folder / FOLDER
    own.mkdir(exist_ok=True)
    save_file(tensors, own / _WEIGHTS, metadata={"format": "pt"})
    about = {"format": _FORMAT, "num_layers": layers, "projection_reads": ["embedding", "hidden"]}
    (own / _CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def layers_in(folder: str | Path) -> int:
    """Return how many modules the head in a model's folder has; 0 if there is none. ThreestepError if its description
    cannot be read."""
    path = Path(folder) / FOLDER / _CONFIG
    if not path.is_file():
        return 0
    try:
        about = parse_json(path.read_text(encoding="utf-8"))
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']}")
        return int(about["num_layers"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ThreestepError(
            f"'{path}': expected the description of a multi-token-prediction head ({{'format': {_FORMAT}, "
            f"'num_layers': ...}}), got {type(problem).__name__}: {problem}; remove '{path.parent}' to train a new "
            "head"
        ) from problem


def read_head(folder: str | Path, head: MtpHead) -> None:
    """Load the weights of a model folder's head into `head`, as many modules as that has, of the first. ThreestepError
    if they are not those of such a head."""
    path = Path(folder) / FOLDER / _WEIGHTS
    stored = stored_state(folder, len(head.depths))
    fill_head(head, stored, str(path), f"remove '{path.parent}' to train a new one")


def stored_state(folder: str | Path, layers: int) -> dict[str, torch.Tensor]:
    """Return the state of the first `layers` modules of a model folder's head."""
    from safetensors.torch import load_file

    depths = tuple(f"depths.{depth}." for depth in range(layers))
    path = Path(folder) / FOLDER / _WEIGHTS
    return {name: tensor for name, tensor in load_file(path).items() if name.startswith(depths)}


def fill_head(head: MtpHead, stored: Mapping[str, torch.Tensor], where: str, otherwise: str) -> None:
    """Give `head` the weights `stored`, by its own names. ThreestepError if they are not those of such a head: of
    `where`, with `otherwise` as the way out."""
    wanted = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    wrong = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if wrong:
        expected, got = (list(of[wrong[0]]) if wrong[0] in of else "nothing" for of in (wanted, found))
        if all(name.endswith(FINAL_NORM) for name in wrong):
            value = "true" if got != "nothing" else "false"
            otherwise = f"set --mtp_final_norm {value}"
        raise ThreestepError(
            f"'{where}': for {wrong[0]}, expected {expected}, got {got}; the head belongs to another model: {otherwise}"
        )
    head.load_state_dict(dict(stored))
