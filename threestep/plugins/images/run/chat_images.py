"""The images of a conversation with a finished model: read as those of rows, and held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.images.data.decoding import decoded, picture_size
from threestep.plugins.images.models.pictured import RowImages
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import MOST_FILE_BYTES
from training.utils.data.build.row_maker import PromptMaker
from training.utils.data.rows.documents import prompt_document
from training.utils.data.rows.media_store import HeldMedia
from training.utils.flags.added import NO_FLAGS

if TYPE_CHECKING:
    from threestep.plugins.images.data.reader import ImageReader
    from training.utils.contracts.documents import Document
    from training.utils.contracts.media import ReadsMedia
    from training.utils.data.arguments import DataArguments

_COLOURS = ((200, 60, 40), (40, 60, 200))  # of two plain pictures, by which a model is checked when it is loaded
_SIDES = (56, 56)  # pixels
PLAIN_PICTURES = len(_COLOURS)
QUESTION = "What is in the picture?"


@dataclass(frozen=True)
class Picture:
    """A file that was read. data: the encoded picture."""

    path: Path
    data: bytes

    @property
    def words(self) -> str:
        """Its name and size."""
        size = picture_size(self.data, str(self.path))
        return f"{self.path.name}: {size.width} x {size.height} pixels ({size.format}, {len(self.data):,} bytes)"


def open_picture(given: str) -> Picture:
    """Read a picture of the user's machine. ThreestepError if there is no such file, and for one that cannot be
    decoded."""
    path = Path(given).expanduser()
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise ThreestepError(
                f"'{given}': expected an image of at most {MOST_FILE_BYTES:,} bytes, got {path.stat().st_size:,}; "
                "make it smaller"
            )
        data = path.read_bytes()
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ThreestepError(f"'{given}' cannot be read as an image file: {reason}; use another file") from problem
    decoded(data, f"'{given}'")
    return Picture(path, data)


def chat_media(reader: ImageReader, data: DataArguments, tokenizer: Any) -> tuple[ReadsMedia, RowImages]:
    """For a model whose images `reader` reads. data: with the prompt style of the model."""
    held = HeldMedia()
    rows = reader.of_rows(held, NO_FLAGS)
    maker = PromptMaker(data, tokenizer, rows)
    examples = tuple(_example(maker, place) for place in range(PLAIN_PICTURES))
    return rows, RowImages(reader.of_stored(held), examples)


def plain_picture(place: int) -> Any:
    """A PIL image of one colour, of which there are `PLAIN_PICTURES`."""
    from PIL import Image

    return Image.new("RGB", _SIDES, _COLOURS[place])


def _example(maker: PromptMaker, place: int) -> Document:
    content = [{"type": "image", "image": plain_picture(place)}, {"type": "text", "text": QUESTION}]
    row = maker.make([{"role": "user", "content": content}], None, place)
    assert row is not None  # a prompt of a few words is never dropped
    return prompt_document(row)
