"""The media of a sample, read from the run's folder into the page: images. A sample names them; a name is untrusted."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from training.utils.contracts.rows import MEDIA_COLUMN, SAMPLE_MEDIA

_MOST = 8  # pictures of a sample
_LARGEST_BYTES = 2**17  # of one, as PNG: those that runs keep have sides of 128 pixels
_NAME = re.compile(r"[0-9a-f]{64}")
MEDIA_STYLE = """.pictures { display: flex; flex-wrap: wrap; align-items: end; gap: 8px; margin: 6px 0; }
.pictures img { max-width: 128px; border: 1px solid var(--edge); border-radius: 4px; }
"""


def sample_media(folder: Path, sample: Mapping[str, Any]) -> tuple[str | None, ...]:
    """A sample's pictures as data addresses; None for one that was not saved. folder: of the step."""
    names = sample.get(MEDIA_COLUMN)
    return tuple(_uri(folder, name) for name in names) if isinstance(names, list) else ()


def media_shown(uris: tuple[str | None, ...]) -> str:
    """The HTML of `sample_media`, at most `_MOST`, and how many are not shown; "" without any."""
    if not uris:
        return ""
    shown = "".join(
        f'<img src="{escape(uri)}" alt="image {number} of {len(uris)}">'
        for number, uri in enumerate(uris[:_MOST], start=1)
        if uri is not None
    )
    left_out = sum(uri is None for uri in uris[:_MOST]) + len(uris[_MOST:])
    note = f'<span class="soft">{left_out} image{"s" * (left_out > 1)} not shown</span>' if left_out else ""
    return f'<div class="pictures">{shown}{note}</div>'


def _uri(folder: Path, name: Any) -> str | None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        return None
    path = folder / SAMPLE_MEDIA / f"{name}.png"
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
        return None
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
