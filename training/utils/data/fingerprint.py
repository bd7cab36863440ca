"""What a build depends on, by content: parts in clear, and one hash over them.

Names, dates and paths do not count: a file that moved is the same file, a file that changed is another.
Knows nothing of where builds are kept.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from training.utils.data.raw_dataset import PromptRawDataset

# A file this small is hashed whenever asked; the hash of a larger one is remembered with its size, times
# and inode.
_ALWAYS_HASHED_BYTES = 4 * 2**20
# A file may change twice within one tick of the clock, so what changed this recently is not remembered.
_SETTLED_SECONDS = 2.0
_MEMO_NAME = "file_digests.json"

# The modules that decide what the cached rows are; a change in any of them rebuilds.
_ROW_MAKERS = (
    "build.py",
    "chat.py",
    "chat_rendering.py",
    "chat_rows.py",
    "chat_spans.py",
    "conversations.py",
    "dataset.py",
    "formats.py",
    "message_forms.py",
    "parallel_thinking.py",
    "phases.py",
    "readers.py",
    "row_makers.py",
    "sources.py",
    "splits.py",
    "tokenize.py",
    "unsupervised.py",
    "../layout/parallel.py",
)


def hash_parts(parts: dict[str, str]) -> str:
    """One sha256 over all parts, in an order that does not matter."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digest_files(paths: Iterable[str], memo_dir: str | None) -> str:
    """The sha256 of several files' contents, in order. With `memo_dir`, large unchanged files are read only
    once.
    """
    total = hashlib.sha256()
    for path in paths:
        total.update(digest_file(path, memo_dir).encode())
    return total.hexdigest()


def digest_file(path: str, memo_dir: str | None) -> str:
    """The sha256 of a file's content.

    With `memo_dir` the hash of a large file is kept there, and trusted while size, modification time,
    change time and inode are what they were (a changed content with its old modification time put back is
    still noticed by the change time).
    """
    state = os.stat(path)
    key = os.path.realpath(path)
    stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    remembers = memo_dir is not None and state.st_size > _ALWAYS_HASHED_BYTES
    memo_path = os.path.join(memo_dir or "", _MEMO_NAME)
    memo = _read_memo(memo_path) if remembers else {}
    if key in memo and memo[key][:4] == stamp:
        return memo[key][4]
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    if remembers and time.time() - max(state.st_mtime, state.st_ctime) > _SETTLED_SECONDS:
        memo[key] = [*stamp, digest.hexdigest()]
        _write_memo(memo_path, memo)
    return digest.hexdigest()


def _read_memo(path: str) -> dict[str, list[Any]]:
    try:
        memo = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    sound = isinstance(memo, dict) and all(isinstance(v, list) and len(v) == 5 for v in memo.values())
    return memo if sound else {}


def _write_memo(path: str, memo: dict[str, list[Any]]) -> None:
    """Whole or not at all; a write that another process overtakes, or the disk refuses, costs one more hashing."""
    temporary = None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=_MEMO_NAME)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(memo, file)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with suppress(OSError):
                os.remove(temporary)


def code_of_rows() -> str:
    """The hash of this package's own modules that decide what a row is."""
    folder = os.path.dirname(os.path.abspath(__file__))
    return digest_files([os.path.join(folder, name) for name in _ROW_MAKERS], memo_dir=None)


def code_of_class(dataset_class: type) -> str:
    """The hash of the files that define a dataset class and the classes it builds on.

    What those files import is not followed.
    """
    files = []
    for base in dataset_class.__mro__:
        if base is object:
            continue
        try:
            files.append(inspect.getfile(base))
        except (TypeError, OSError):
            continue
    known = [path for path in dict.fromkeys(files) if os.path.isfile(path)]
    return dataset_class.__qualname__ + " " + digest_files(known, memo_dir=None)


def content_of_dataset(raw_dataset: PromptRawDataset, memo_dir: str) -> str:
    """The hash of a raw dataset's rows: the class's own answer, otherwise that of training and evaluation
    rows.
    """
    given = raw_dataset.get_fingerprint()
    if given is not None:
        return given
    both = [raw_dataset.get_train_data(), raw_dataset.get_eval_data()]
    return hash_text(" ".join(content_of_rows(rows, memo_dir) for rows in both))


def content_of_rows(rows: Sequence[Any] | None, memo_dir: str) -> str:
    """The hash of rows: an Arrow dataset by its own fingerprint and its files, anything else row by row."""
    if rows is None:
        return "none"
    if hasattr(rows, "_fingerprint") and hasattr(rows, "cache_files"):
        return _content_of_arrow_dataset(rows, memo_dir)
    digest = hashlib.sha256()
    for index in range(len(rows)):
        row = json.dumps(rows[index], sort_keys=True, ensure_ascii=False, default=repr)
        digest.update(row.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _content_of_arrow_dataset(rows: Any, memo_dir: str) -> str:
    """`_fingerprint` covers the source's revision and every select or map; the files are hashed besides."""
    files = [entry["filename"] for entry in rows.cache_files]
    if files:
        return hash_text(f"{rows._fingerprint} {len(rows)} {digest_files(files, memo_dir)}")
    import pyarrow

    sink = _HashingSink()
    with pyarrow.ipc.new_stream(sink, rows.data.schema) as stream:
        stream.write_table(rows.data.table)
    return hash_text(f"{rows._fingerprint} {len(rows)} {sink.digest.hexdigest()}")


class _HashingSink:
    """A file that keeps only the hash of what is written to it."""

    closed = False

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, content: Any) -> int:
        self.digest.update(content)
        return len(content)

    def flush(self) -> None:
        pass


def parts_of_tokenizer(tokenizer: Any) -> dict[str, str]:
    """The tokenizer by content: its model, its special tokens and its chat template."""
    template = getattr(tokenizer, "chat_template", None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return {
        "tokenizer": f"{type(tokenizer).__name__} {_content_of_tokenizer(tokenizer)}",
        "special tokens": json.dumps(special, sort_keys=True, ensure_ascii=False),
        "chat template": hash_text(json.dumps(template, sort_keys=True)) if template else "none",
    }


def _content_of_tokenizer(tokenizer: Any) -> str:
    if getattr(tokenizer, "is_fast", False):
        text = tokenizer.backend_tokenizer.to_str()
        # Truncation and padding come first in the text; they are what the last call asked for, not the
        # tokenizer.
        begin = text.find('"added_tokens"')
        return hash_text(text[begin:] if begin >= 0 else text)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return digest_files(sorted(str(path) for path in Path(folder).rglob("*") if path.is_file()), None)
