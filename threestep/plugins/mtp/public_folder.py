"""A head in the files of a public checkpoint: found by their headers, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from threestep.plugins.mtp.folder import FINAL_NORM, fill_head
from threestep.plugins.mtp.public_names import (
    PublicForm,
    after_the_norm,
    depths_of,
    form_of,
    from_public,
    names_in_head,
)
from training.utils.base.errors import ThreestepError
from training.utils.loading.weight_files import StoredTensor, read_header, weight_files

if TYPE_CHECKING:
    import torch

    from threestep.plugins.mtp.head import MtpHead

_MODELS_NORM = "model.norm.weight"


@dataclass(frozen=True)
class PublicHead:
    """folder: with the checkpoint's files. depths: modules that are there. tensors: of the whole checkpoint, by name.
    model_layers: of the model."""

    folder: Path
    form: PublicForm
    depths: int
    tensors: Mapping[str, StoredTensor]
    model_layers: int

    @property
    def names(self) -> str:
        """Its tensors' names and whose they are, for a message."""
        return f"{self.form.shown(self.model_layers)} (the names of {self.form.families})"

    def read(self, head: MtpHead) -> None:
        """Load the first modules into `head`, as many as it has. ThreestepError if they are not those of such a
        head."""
        depths, has_norm = len(head.depths), any(name.endswith(FINAL_NORM) for name in head.state_dict())
        wanted = names_in_head(self.form, self.tensors, self.model_layers, depths)
        tensors = self._tensors(wanted)
        stored = from_public(self.form, tensors, self.model_layers, depths)
        # A head of ERNIE's form without a norm at its end is read as vLLM runs it: after the model's norm.
        if self.form.before_norm and has_norm:
            stored = after_the_norm(self.form, stored, self._models_norm(), depths)
        fill_head(head, stored, f"{self.folder}: {self.names}", "pass this model's original checkpoint")

    def _models_norm(self) -> torch.Tensor:
        if _MODELS_NORM not in self.tensors:
            raise ThreestepError(
                f"'{self.folder}: {self.names}': heads of {self.form.families} use the model's hidden states from "
                f"before its final norm, which requires {_MODELS_NORM} in the same files, but it is missing; pass the "
                "model's complete checkpoint"
            )
        return self._tensors([_MODELS_NORM])[_MODELS_NORM]

    def _tensors(self, wanted: Collection[str]) -> dict[str, torch.Tensor]:
        from safetensors import safe_open

        tensors = {}
        for file in sorted({self.tensors[name].file for name in wanted}):
            with safe_open(file, framework="pt") as opened:
                for name in wanted:
                    if self.tensors[name].file == file:
                        tensors[name] = opened.get_tensor(name)
        return tensors


def public_head_in(name_or_path: str, model_layers: int) -> PublicHead | None:
    """Return the head of the checkpoint that a model was loaded from; None if it has none under a known name.
    ThreestepError if its files are damaged."""
    folder = _folder_of(name_or_path)
    if folder is None:
        return None
    tensors = {name: tensor for file in weight_files(folder) for name, tensor in read_header(file).items()}
    form = form_of(tensors, model_layers)
    if form is None:
        return None
    return PublicHead(folder, form, depths_of(form, tensors, model_layers), tensors, model_layers)


def _folder_of(name_or_path: str) -> Path | None:
    """The folder itself, or where the hub's cache has the files of a name."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name_or_path, "config.json")
    except ValueError:  # no name of the hub
        return None
    return Path(found).parent if isinstance(found, str) else None
