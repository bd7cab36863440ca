"""Names of this project in the texts about it: dotted names and paths in backticks that no module or folder has.

`layout.planner` is a module by the end of its name, `engine/ranks` a folder by the end of its path. Looked at are
dotted names that begin with a module or room of today, and paths that begin with a room or are one word and a slash.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping

from tests.support.imports import plain_name
from tests.support.sources import tree

_SPAN = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(r"[a-z_]\w*(\.\w+)+")
_PATH = re.compile(r"\w+(/[\w.]+)*/?")
_FILE = re.compile(r"\.(gz|safetensors|jsonl?|py|md|sh|ya?ml|toml|html|csv|png|txt)$")
# Beginnings that are names of modules here, and elsewhere what the text means: libraries, configurations, models.
ELSEWHERE = ("algorithm.kl_ctrl", "config", "datasets", "model", "tokenizers")
# Beginnings of paths that are curves, or files of a user or run.
CURVES_AND_FILES = (
    "actor", "build", "checkpoints", "critic", "data/eval.json", "data/train.json", "eval", "eval_greedy", "mismatch",
    "model", "model_ema", "tensorboard", "train",
)  # fmt: skip


def spans_of_source(source: str) -> Iterator[str]:
    """Yield what stands in backticks in the docstrings and comments of a module."""
    for node in ast.walk(tree(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _SPAN.findall(ast.get_docstring(node) or "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _SPAN.findall(token.string)


class Names:
    def __init__(self, sources: Mapping[str, str], paths: Iterable[str]) -> None:
        """sources: text of modules by dotted name. paths: of files and folders, from the checkout's root."""
        self._words = {plain_name(module): set(re.findall(r"\w+", source)) for module, source in sources.items()}
        self._places = {*paths, *(module.replace(".", "/") for module in self._words)}
        self._beginnings = {part for module in self._words for part in module.split(".")}
        self._folders = {place[: slash.start()] for place in self._places for slash in re.finditer("/", place)}
        self._rooms = {part for module in sources for part in module.split(".")[:-1]}
        self._fields = set(re.findall(r"^    (\w+): ", "\n".join(sources.values()), re.MULTILINE))

    def dead(self, spans: Iterable[str]) -> list[str]:
        """Return those of `spans` that begin as names of the checkout and lead nowhere."""
        return [span for span in spans if not self._lives(re.sub(r"\(.*\)$", "", span).strip())]

    def _lives(self, name: str) -> bool:
        if _DOTTED.fullmatch(name) and not _FILE.search(name):
            return self._is_module_or_in_one(name.split("."))
        if "/" in name and _PATH.fullmatch(name):
            path = name.rstrip("/")
            if path.split("/")[0] not in self._rooms and "/" in path:
                return True
            if any(f"{path}/".startswith(f"{begin}/") for begin in CURVES_AND_FILES):
                return True
            places = self._folders if name.endswith("/") else self._places
            return any(f"/{place}".endswith((f"/{path}", f"/{path.removesuffix('.py')}")) for place in places)
        return True

    def _is_module_or_in_one(self, parts: list[str]) -> bool:
        if parts[0] not in self._beginnings or f"{'.'.join(parts)}.".startswith(
            tuple(f"{begin}." for begin in ELSEWHERE)
        ):
            return True
        if len(parts) == 2 and parts[0] not in self._rooms and parts[1] in self._fields:
            return True  # a record that goes by its module's name: `plan.rows`
        for end in range(len(parts), 0, -1):
            begin, rest = f".{'.'.join(parts[:end])}", set(parts[end:])
            if any(f".{module}".endswith(begin) and rest <= words for module, words in self._words.items()):
                return True
        return False
