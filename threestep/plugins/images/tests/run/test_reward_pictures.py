"""The pictures of a prompt, as a reward sees them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from threestep.plugins.images.data.reader import PixelReader
from threestep.plugins.images.run.reward_pictures import pictures_of
from training.utils.contracts.documents import MediaSpan
from training.utils.contracts.rows import PromptRow


def test_a_reward_sees_the_pictures_of_a_prompt():
    """One of two tiles, another, the first again; each is decoded when it is taken."""
    stored = {}
    for key, color in ((4, "red"), (9, "blue")):
        file = io.BytesIO()
        Image.new("RGBA", (3, 2), color).save(file, format="PNG")
        stored[key] = file.getvalue()
    spans = [MediaSpan(at, 1, key=key) for at, key in enumerate((4, 4, 9, 4, 4))]
    row = PromptRow(0, np.arange(5), "", None, media=tuple(spans), media_digests=("a", "b", "a"))
    reader: Any = None
    found = pictures_of(PixelReader(reader, stored), row)
    assert [(one.mode, one.size, one.getpixel((0, 0))) for one in found] == [
        ("RGB", (3, 2), color) for color in ((255, 0, 0), (0, 0, 255), (255, 0, 0))
    ]
    assert found.encoded[1] == stored[9] and found[0] is not found[0] and len(found[1:]) == 2
    assert len(pictures_of(PixelReader(reader, stored), PromptRow(0, np.arange(5), "", None))) == 0
