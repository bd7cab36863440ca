"""Texts with blocks of parallel paths, and who sees whom in them, said token by token from how the text was put
together: no tag is parsed here.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from threestep.plugins.parallel_thinking.layout import ParallelTags
from training.utils.contracts.documents import TokenSequence

TAGS = ParallelTags(open_block=3, open_path=4, close_path=5, close_block=6)  # ordinary tokens are 10 and up
WRITTEN_TAGS = ["<Parallel>", "<Path>", "</Path>", "</Parallel>"]


@dataclass(frozen=True)
class Path:
    """What stands between the tags of a path, and what follows its closing tag."""

    inside: Sequence[int]
    behind: Sequence[int] = ()


@dataclass
class Text:
    """ids: the tokens. places: for each token None (trunk) or (block, path). positions, predecessors: by the rule."""

    ids: list[int] = field(default_factory=list)
    places: list[tuple[int, int] | None] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    predecessors: list[int] = field(default_factory=list)
    _next: int = 0
    _blocks: int = 0

    def trunk(self, *ids: int) -> Text:
        for token in ids:
            self._add(token, None, self._next, len(self.ids) - 1)
            self._next += 1
        return self

    def block(self, *paths: Path, opening: Sequence[int] = ()) -> Text:
        self.trunk(TAGS.open_block, *opening)
        last, first, longest = len(self.ids) - 1, self._next, 0
        for number, path in enumerate(paths):
            tokens = [TAGS.open_path, *path.inside, TAGS.close_path, *path.behind]
            for offset, token in enumerate(tokens):
                before = last if offset == 0 else len(self.ids) - 1
                self._add(token, (self._blocks, number), first + offset, before)
            longest = max(longest, len(tokens))
        self._blocks += 1
        self._next = first + longest
        return self.trunk(TAGS.close_block)

    def _add(self, token: int, place: tuple[int, int] | None, position: int, predecessor: int) -> None:
        self.ids.append(token)
        self.places.append(place)
        self.positions.append(position)
        self.predecessors.append(predecessor)

    def mask(self) -> torch.Tensor:
        """bool [T, T]: a token sees what stands before it, but for other paths of its own block."""
        seen = torch.ones(len(self.ids), len(self.ids), dtype=torch.bool).tril()
        for here, mine in enumerate(self.places):
            for there, theirs in enumerate(self.places):
                if mine is not None and theirs is not None and mine[0] == theirs[0] and mine[1] != theirs[1]:
                    seen[here, there] = False
        return seen

    def sequence(self, first_target: int = 1) -> TokenSequence:
        """Every token from `first_target` on is to be predicted."""
        return TokenSequence(torch.tensor(self.ids), torch.arange(len(self.ids)) >= first_target)


def some_ids(least: int, most: int = 4) -> Any:
    return st.lists(st.integers(10, 49), min_size=least, max_size=most)


@st.composite
def texts(draw: Any, most_blocks: int = 3, text_behind: bool = True) -> Text:
    """A beginning, then blocks with text behind each. text_behind: paths may have some too."""
    text = Text().trunk(*draw(some_ids(1)))
    for _ in range(draw(st.integers(0, most_blocks))):
        paths = [Path(draw(some_ids(1)), draw(some_ids(0, 2 * text_behind))) for _ in range(draw(st.integers(1, 3)))]
        text.block(*paths, opening=draw(some_ids(0, 2))).trunk(*draw(some_ids(0)))
    return text


def fond_of_tags(folder: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """The model, with a feature that is positive at every token and by which its head likes the first three tags."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    head = torch.nn.Parameter(model.get_output_embeddings().weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        head[:, 0] = 0.0
        head[tokenizer.convert_tokens_to_ids(WRITTEN_TAGS[:3]), 0] = 12.0
    model.get_output_embeddings().weight = head
    model.config.tie_word_embeddings = False
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    return to
