"""Rollouts in which the paths of a block are drawn side by side, laid out as in training (`layout`).

Where the trunk draws `<Parallel>` and behind it, at once or after some text, `<Path>`, it parts into paths. Each is a
row of its own that sees the trunk and itself, begins with `<Path>` and ends with `</Path>`. When the last of them has
ended, the trunk goes on behind the longest with `</Parallel>`, and sees all. What the model does not draw itself is put
there, marked as inserted:

- `<Path>` of all paths but the first, which draws it (they would all begin from one state, with one probability);
- `</Path>` of a path that comes to its limit, or that draws the token that ends a response;
- `</Parallel>`.

A tag in any other place is text (`layout.drawn_blocks`). The limit of a response counts positions: the trunk,
and of each block the longest path. Every token is drawn by a number of its own, from the response's seed and the
token's place: in the trunk its position (so that a response without blocks is the one that is drawn in one piece), in a
path the block, the path and the place in it.

A rows, B responses, R tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from threestep.plugins.ragged.ragged_rows import Held, RaggedRows, arranged
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import derived_seed
from training.utils.contracts.rollout import FormedResponses, Response, Rollout, right_padded
from training.utils.generation.decoding.sampling import draw

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.parallel_thinking.layout import PathSampling
    from training.utils.contracts.rollout_engine import RolloutRequest, Sampling


@dataclass
class _Text:
    """Tokens, with their log-probabilities; 0 of those that are inserted."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    inserted: list[bool] = field(default_factory=list)

    def draw(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.inserted.append(False)

    def insert(self, token: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(0.0)
        self.inserted.append(True)

    def extend(self, other: _Text) -> None:
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.inserted += other.inserted


@dataclass(eq=False)
class _Trunk:
    """A response outside of paths. position: of the next token, counted from the response's first. in_opening: behind
    `<Parallel>`, before the first `<Path>`. blocks: how many there are."""

    seed: int
    uniform: Sequence[float]
    text: _Text = field(default_factory=_Text)
    position: int = 0
    in_opening: bool = False
    blocks: int = 0
    ended: bool = False

    @property
    def next_uniform(self) -> float:
        return self.uniform[self.position]


@dataclass(eq=False)
class _Block:
    """An open block. start: its paths' first position. column: the first that its paths fill. open: how many paths have
    not ended. held: what those that have ended leave for the trunk."""

    trunk: _Trunk
    start: int
    column: int
    open: int
    paths: list[_Path] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


@dataclass(eq=False)
class _Path:
    """is_over: its `</Path>` is there. must_end: the next token is."""

    block: _Block
    uniform: Sequence[float]
    text: _Text = field(default_factory=_Text)
    is_over: bool = False
    must_end: bool = False

    @property
    def position(self) -> int:
        return self.block.start + len(self.text.tokens)

    @property
    def next_uniform(self) -> float:
        # A path that is over draws no more; its row asks once more, and is not read.
        return self.uniform[min(len(self.text.tokens), len(self.uniform) - 1)]


_Line = _Trunk | _Path
# A row that goes on: the old row, whose it is, and the token that it takes.
_Next = tuple[int, tuple[_Line, int]]


def check_paths(model: PreTrainedModel, masks_are_ours: bool) -> None:
    """ThreestepError if paths cannot be drawn side by side from a model."""
    reason = None if masks_are_ours else "the model family builds its own attention masks"
    try:
        RaggedRows(model)
    except ValueError as problem:
        reason = str(problem)
    if reason is not None:
        raise ThreestepError(
            "--parallel_thinking generates paths side by side, which needs a model whose layers cache the keys of "
            f"all tokens and accept a mask, but {type(model).__name__} does not support this: {reason}; use another "
            "model, or leave --parallel_thinking out"
        )


def drawn_side_by_side(model: PreTrainedModel, request: RolloutRequest, paths: PathSampling) -> Rollout:
    """Return the responses to `request`. ValueError: see `RaggedRows`."""
    rows, trunks = RaggedRows(model), _trunks(request)
    logits_AV, after_prompt = _prefilled(rows, request)
    drawing = _Drawing(rows, request.sampling, paths)
    first = {id(trunk): position for trunk, position in zip(trunks, after_prompt, strict=True)}
    lines: list[_Line] = list(trunks)
    while True:
        uniform_A = torch.tensor([line.next_uniform for line in lines], dtype=torch.float64, device=logits_AV.device)
        token_A, logprob_A = draw(logits_AV, uniform_A, request.sampling)
        drawn = zip(lines, token_A.tolist(), logprob_A.tolist(), strict=True)
        going = arranged([each for row, given in enumerate(drawn) for each in drawing.next(row, *given)])
        if not going:
            return _rollout(request, trunks)
        rows.reorder([row for row, _ in going])
        lines = [line for _, (line, _) in going]
        # A line has counted the token already.
        positions = [first[id(_trunk_of(line))] + line.position - 1 for line in lines]
        logits_AV = rows.append([token for _, (_, token) in going], positions)


def _prefilled(rows: RaggedRows, request: RolloutRequest) -> tuple[torch.Tensor, list[int]]:
    """Compute each prompt once, then give each sample a row; return the logits [A, V] behind them, and the rows' next
    positions."""
    prompts = [
        ids_P[mask_P].tolist() for ids_P, mask_P in zip(request.prompt_ids_BP, request.prompt_mask_BP, strict=True)
    ]
    rows.add(len(prompts))
    logits_BV = rows.give(0, prompts)
    rows.reorder([prompt for prompt in range(len(prompts)) for _ in range(request.samples_per_prompt)])
    return logits_BV.repeat_interleave(request.samples_per_prompt, dim=0), list(rows.filled)


class _Drawing:
    """The tokens to come after each that is drawn."""

    def __init__(self, rows: RaggedRows, sampling: Sampling, paths: PathSampling) -> None:
        self._rows, self._paths, self._tags = rows, paths, paths.tags
        self._ends, self._most = sampling.end_token_ids, sampling.max_new_tokens

    def next(self, row: int, line: _Line, token: int, logprob: float) -> list[_Next]:
        """Return what goes on from a row whose line has drawn a token: nothing, itself, or the paths of a block."""
        if isinstance(line, _Trunk):
            return self._in_trunk(row, line, token, logprob)
        return self._behind_path(row, line.block) if line.is_over else self._in_path(row, line, token, logprob)

    def _in_trunk(self, row: int, trunk: _Trunk, token: int, logprob: float) -> list[_Next]:
        trunk.text.draw(token, logprob)
        trunk.position += 1
        if token in self._ends:
            trunk.ended = True
            return []
        if trunk.position == self._most:
            return []
        if trunk.in_opening and token == self._tags.open_path:
            return self._parted(row, trunk)
        trunk.in_opening |= token == self._tags.open_block
        return [(row, (trunk, token))]

    def _parted(self, row: int, trunk: _Trunk) -> list[_Next]:
        """The trunk has drawn the `<Path>` of the first path."""
        count, first = self._paths.count, trunk.text
        start = trunk.position - 1
        block = _Block(trunk, start, self._rows.filled[row], count)
        for number in range(count):
            seed = derived_seed(trunk.seed, "path", trunk.blocks, number)
            path = _Path(block, _stream(seed, self._last_place(start) + 1))
            path.text.insert(self._tags.open_path)
            block.paths.append(path)
        opening = block.paths[0].text
        opening.logprobs, opening.inserted = [first.logprobs.pop()], [first.inserted.pop()]
        first.tokens.pop()
        trunk.blocks, trunk.in_opening = trunk.blocks + 1, False
        return [(row, (path, self._tags.open_path)) for path in block.paths]

    def _last_place(self, start: int) -> int:
        """The last place in a path for its `</Path>`."""
        last = self._most - 1 - start
        return last if self._paths.most_tokens is None else min(last, self._paths.most_tokens - 1)

    def _in_path(self, row: int, path: _Path, token: int, logprob: float) -> list[_Next]:
        close = self._tags.close_path
        is_last = len(path.text.tokens) == self._last_place(path.block.start)
        if path.must_end or (is_last and token != close):
            token = close
            path.text.insert(close)
        else:
            path.text.draw(token, logprob)
        path.is_over, path.must_end = token == close, token in self._ends
        return [(row, (path, token))]

    def _behind_path(self, row: int, block: _Block) -> list[_Next]:
        """A path has ended, and its last token is computed."""
        block.open -= 1
        if block.open:
            block.held.append(self._rows.held(row, block.column))
            return []
        trunk = block.trunk
        trunk.position = max(path.position for path in block.paths)
        for path in block.paths:
            trunk.text.extend(path.text)
        if trunk.position == self._most:
            return []
        self._rows.take(row, block.held)
        trunk.text.insert(self._tags.close_block)
        trunk.position += 1
        return [] if trunk.position == self._most else [(row, (trunk, self._tags.close_block))]


def _trunk_of(line: _Line) -> _Trunk:
    return line if isinstance(line, _Trunk) else line.block.trunk


def _trunks(request: RolloutRequest) -> list[_Trunk]:
    most = request.sampling.max_new_tokens
    return [_Trunk(seed, _stream(seed, most)) for seed in request.seeds]


def _stream(seed: int, tokens: int) -> list[float]:
    """The numbers of a stream, as `hf` draws them."""
    return torch.rand(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


def _rollout(request: RolloutRequest, trunks: Sequence[_Trunk]) -> Rollout:
    prompts = request.repeated()
    responses = [Response(trunk.text.tokens, trunk.text.logprobs, trunk.ended) for trunk in trunks]
    inserted_BR = right_padded([trunk.text.inserted for trunk in trunks], False, torch.bool)
    positions_B = torch.tensor([trunk.position for trunk in trunks])
    rollout = Rollout.of_responses(prompts, responses, request.sampling.pad_token_id)
    device = prompts[0].device
    return replace(rollout, inserted=FormedResponses(inserted_BR.to(device), positions_B.to(device)))
