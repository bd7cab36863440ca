"""A head in the files of a public checkpoint: found by their headers, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.utils.loading.weight_files import StoredTensor, read_header, weight_files
from training.utils.mtp.folder import fill_head
from training.utils.mtp.head import MtpHead
from training.utils.mtp.public_names import PublicForm, depths_of, form_of, from_public, names_in_head


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
        from safetensors import safe_open

        depths, tensors = len(head.depths), {}
        wanted = names_in_head(self.form, self.tensors, self.model_layers, depths)
        for file in sorted({self.tensors[name].file for name in wanted}):
            with safe_open(file, framework="pt") as opened:
                for name in wanted:
                    if self.tensors[name].file == file:
                        tensors[name] = opened.get_tensor(name)
        stored = from_public(self.form, tensors, self.model_layers, depths)
        fill_head(head, stored, f"{self.folder}: {self.names}", "give the plain checkpoint of this model")


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
