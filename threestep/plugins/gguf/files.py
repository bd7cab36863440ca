"""A GGUF file as a model folder. Cheap to import: every program that is given a model calls `as_folder`.

The folder is made once, in a cache, and has the file's weights in float32 as safetensors. So every step, ZeRO stage and
rollout engine reads it as it reads any other model.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from threestep.plugins.gguf.tokenizer import ORIGINAL
from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import read_json_object
from training.utils.data.cache.cache import locked
from training.utils.data.files.digests import digest_file

_SUFFIX = ".gguf"
_SOURCE = "gguf_source.json"  # in the folder: the file's name, type and weights
_CACHE = Path("~", ".cache", "threestep", "gguf")
_FORM = 1  # of what `conversion` writes; a new one makes every folder again
_PART = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<parts>\d{5})\.gguf")  # as llama.cpp names the parts of a split file


def as_folder(given: str) -> str:
    """Return the model folder of a GGUF file, or of a folder with one and no safetensors; any other name as it is.

    The first call for a file makes the folder. ThreestepError if the file is missing, damaged, split, of a family that
    is not read here, or without a tokenizer.
    """
    file = _file_of(given)
    if file is None:
        return given
    cache = _CACHE.expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = cache / f"{file.stem}-{digest_file(str(file), str(cache))[:12]}-{_FORM}"
        with locked(
            f"{folder}.lock", lambda: log_on_main(f"gguf: waiting for another process that is reading {file.name}")
        ):
            if not folder.exists():
                from threestep.plugins.gguf.conversion import write_folder

                log_on_main(f"gguf: reading {file} for the first time")
                write_folder(file, folder, _SOURCE)
    except OSError as problem:
        raise ThreestepError(
            f"cannot read '{file}' or write its weights in float32 to {cache}: {problem.strerror or problem}"
        ) from problem
    source = read_json_object(str(folder / _SOURCE)) or {}
    log_on_main(
        f"gguf: {file.name} ({source.get('type')}, {source.get('weights', 0):,} weights) is used in float32 from "
        f"{folder}; trained models are saved as safetensors, not as GGUF"
    )
    return str(folder)


def _file_of(given: str) -> Path | None:
    path = Path(given).expanduser()
    if path.is_dir():
        return _file_in(path)
    if path.suffix.lower() != _SUFFIX:
        return None
    if not path.is_file():
        near = get_close_matches(path.name, [each.name for each in path.parent.glob(f"*{_SUFFIX}")], n=3)
        hint = f"; did you mean {' or '.join(repr(str(path.parent / each)) for each in near)}?" if near else ""
        raise ThreestepError(f"the file '{given}' does not exist{hint}")
    return _whole(path)


def _file_in(folder: Path) -> Path | None:
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1 and not _PART.fullmatch(files[0].name):
        names = ", ".join(each.name for each in files)
        raise ThreestepError(f"'{folder}' holds {len(files)} GGUF files ({names}); pass the path of one of them")
    return _whole(files[0])


def _whole(file: Path) -> Path:
    """The same file; ThreestepError if it is one part of several."""
    part = _PART.fullmatch(file.name)
    if part is not None and int(part["parts"]) > 1:
        raise ThreestepError(
            f"'{file}' is one of {int(part['parts'])} parts; join them with llama.cpp: llama-gguf-split --merge "
            f"{file.with_name(re.sub('-[0-9]{5}-of', '-00001-of', file.name))} {part['name']}{_SUFFIX}; or {ORIGINAL}"
        )
    return file
