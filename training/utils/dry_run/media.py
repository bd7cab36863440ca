"""The memory that images add to a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.dry_run.activations import saved_by_picture
from training.utils.dry_run.table import MemoryLine
from training.utils.images.run.image_reader import picture_of_model
from training.utils.models.families.parts import is_beside_language

if TYPE_CHECKING:
    from training.utils.images.spans import ImagePixels


@dataclass(frozen=True)
class PlannedMedia:
    """pixels: of a picture that stands for all. tokens: that it takes. most: tokens of pictures in a forward. at_once:
    in all forwards that are laid out together, whose pixels are in memory until the last is done."""

    pixels: ImagePixels
    tokens: int
    most: int
    at_once: int

    @property
    def sentence(self) -> str:
        return f"pictures: counted as if {self.most:,} tokens of a forward were theirs; fewer take less"

    def times(self, of_one: float) -> int:
        """Bytes of all pictures of a forward, from those of one."""
        return int(of_one * self.most / self.tokens)


def planned_media(name_or_path: str, trust_remote_code: bool, most: int, at_once: int) -> PlannedMedia | None:
    """Return a picture as a model's processor makes it, for rows with images; None for a model of text, and without
    files of tokenizer and image processor. most, at_once: see `PlannedMedia`."""
    seen = picture_of_model(name_or_path, trust_remote_code)
    return None if seen is None else PlannedMedia(*seen, most, at_once)


def kept_features_line(pictures: PlannedMedia | None, most_mb: int) -> MemoryLine:
    """The most that `--kept_image_features_mb` holds."""
    return MemoryLine("pictures: features that are kept", 0, 0 if pictures is None else most_mb * 2**20)


def media_lines(
    model: Any, pictures: PlannedMedia | None, gradient_checkpointing: bool = False, beside: int | None = None
) -> list[MemoryLine]:
    """Return what pictures add to a forward of `model`, a model on the meta device; nothing of one of text.

    beside: bytes that the language model's forward saves for a backward, after the pictures are read; None: it has no
    backward. Then, and while a frozen tower reads, one of its blocks is held at a time.
    """
    is_beside = is_beside_language(model)
    if pictures is None or not any(is_beside(name) for name, _ in model.named_parameters()):
        return []
    values, size = pictures.pixels.values, model.dtype.itemsize
    own = values.numel() * (values.element_size() + (size if model.dtype != values.dtype else 0))
    saved = 0 if beside is None else saved_by_picture(model, pictures.pixels).held(gradient_checkpointing)
    block = max(saved_by_picture(model, pictures.pixels, trains=True).layers, default=0)
    activations = max(pictures.times(saved), pictures.times(block) - (beside or 0))
    embedded = pictures.tokens * model.config.get_text_config().hidden_size * size
    return [
        MemoryLine("pictures: pixels", own * pictures.at_once // pictures.tokens),
        MemoryLine("pictures: embeddings", pictures.times(embedded)),
        MemoryLine("pictures: activations of tower and projector", activations),
    ]
