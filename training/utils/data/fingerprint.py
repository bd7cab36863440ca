"""Fingerprints of a build's inputs, by content: datasets, their classes, the tokenizer, and versions of what rows hold.

Names, dates and paths do not count: a moved file is the same, a changed file is another. Knows nothing of where builds
are stored.

Give a version another text whenever the same sources make other rows: caches are built again then, and a run that
resumes learns of it. Hashes among these texts are those of the files when versions took their place, by which earlier
caches and checkpoints are known. 2: a row has the ids of its whole text, and turns end as the chat template ends
them."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.storage import HashedFile
from training.utils.base.user_files import call_user, loaded_name
from training.utils.data.files.digests import digest_file, digest_files, hash_text

if TYPE_CHECKING:
    from training.utils.data.raw_dataset import PromptRawDataset

# Sources, chat templates, tokens, truncation and layout.
ROWS = "2"
# The package's dataset classes, by the last name of their module. A class that is missing here counts by its
# module's `ROWS_VERSION`, or else by its file.
CLASSES = {
    "raw_dataset": "232592cdef2f77529703093615eee18a18d5402b4f17b345a4525525f551d147",
    "file_dataset": "2",
    "row_maker": "a38a98074f1b45fb0cb6aa37b95943969db5faa2cc44dbce549e2fbc41adddb8",
}


def code_of_class(dataset_class: type) -> str:
    """Return the versions of a dataset class and its base classes: of the package's by `CLASSES`, of others
    the `ROWS_VERSION` of their modules, or else the hashes of their files, without what these import."""
    versions = []
    for base in dataset_class.__mro__:
        package, _, name = base.__module__.rpartition(".")
        version = getattr(sys.modules.get(base.__module__), "ROWS_VERSION", None)
        if package.startswith(loaded_name("training.")) and name in CLASSES:
            version = CLASSES[name]
        if version is not None:
            versions.append(version)
            continue
        with suppress(TypeError, OSError):  # a class without a file, such as object
            if os.path.isfile(path := inspect.getfile(base)):
                versions.append(digest_file(path, memo_dir=None))
    return f"{dataset_class.__qualname__} {hash_text(''.join(dict.fromkeys(versions)))}"


def content_of_dataset(raw_dataset: PromptRawDataset, memo_dir: str) -> str:
    """The hash of a raw dataset's rows: the class's fingerprint, otherwise that of its training and evaluation rows."""
    given = raw_dataset.get_fingerprint()
    if given is not None:
        return given
    both = [call_user(raw_dataset.get_train_data), call_user(raw_dataset.get_eval_data)]
    return hash_text(" ".join(content_of_rows(rows, memo_dir) for rows in both))


def content_of_rows(rows: Sequence[Any] | None, memo_dir: str) -> str:
    """The hash of rows: an Arrow dataset by its fingerprint and its files, anything else row by row."""
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
    """`_fingerprint` covers the source's revision and every select or map; the files are hashed too."""
    files = [entry["filename"] for entry in rows.cache_files]
    if files:
        return hash_text(f"{rows._fingerprint} {len(rows)} {digest_files(files, memo_dir)}")
    import pyarrow

    with HashedFile(os.devnull) as hashed, pyarrow.ipc.new_stream(hashed, rows.data.schema) as stream:
        stream.write_table(rows.data.table)
    return hash_text(f"{rows._fingerprint} {len(rows)} {hashed.sha256}")


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
        # Truncation and padding come first in the text; they belong to the last call, not to the tokenizer.
        begin = text.find('"added_tokens"')
        return hash_text(text[begin:] if begin >= 0 else text)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return digest_files(sorted(str(path) for path in Path(folder).rglob("*") if path.is_file()), None)
