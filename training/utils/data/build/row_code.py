"""Which modules decide what a cached row is: a change in any of them rebuilds the cache.

They are what build.py and unsupervised.py import, directly or not, of the data rooms and the layout; read from source
text. Left out are the cache, which stores rows, and the flags, whose values are in the fingerprint themselves.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from training.utils.data.files.digests import digest_files

_UTILS = Path(__file__).resolve().parents[2]
_BEGIN = ("data.build.build", "data.build.unsupervised")
_FOLLOWED = ("data.", "layout.")
_LEFT_OUT = re.compile(r"data\.cache\..*|.*\.arguments")
_IMPORT = re.compile(r"^\s*from training\.utils\.([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)


@cache
def code_of_rows() -> str:
    """The hash of all of these modules; a program reads them once."""
    return digest_files(map(str, row_modules(_UTILS)), memo_dir=None)


def row_modules(utils: Path) -> list[Path]:
    """The files of these modules in the folder training/utils, sorted."""
    found: dict[str, Path] = {}
    waiting = list(_BEGIN)
    while waiting:
        name = waiting.pop()
        path = utils / (name.replace(".", "/") + ".py")
        if name in found or not name.startswith(_FOLLOWED) or _LEFT_OUT.fullmatch(name) or not path.is_file():
            continue
        found[name] = path
        for module, imported in _IMPORT.findall(path.read_text("utf-8")):
            waiting += [module, *(f"{module}.{each}" for each in re.findall(r"\w+", imported))]
    return sorted(found.values())
