"""Answers while they are drawn, and the rows that draw them: all in one batch, or where a family cannot, one beside the
other.

A rows, J of them that join, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import torch

from threestep.plugins.ragged.ragged_rows import RaggedRows, arranged
from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.drawn import uniform_streams
from training.utils.generation.decoding.sampling import draw

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.rollout_engine import Sampling

_Prompt = tuple[tuple[int, ...], int]
STOP, LENGTH = "stop", "length"  # OpenAI's words for what ended an answer


@dataclass(frozen=True)
class Order:
    """An answer to draw. ids: of the prompt. ends: tokens, each of which ends it. alternatives: see
    `fields.CompletionRequest`. media: of the prompt, the same object for all answers to it; None of a text."""

    ids: tuple[int, ...]
    sampling: Sampling
    ends: frozenset[int]
    seed: int
    alternatives: int | None = None
    media: Any = None


@dataclass(frozen=True)
class DrawnToken:
    """token: the id. logprob, alternatives (ids with their log-probabilities): of the model itself, whatever the
    temperature and the cuts; None and none unless they are asked for."""

    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """News of the answer number `place` of a request: a token, its end (STOP or LENGTH), or the reason that there is
    none."""

    place: int
    token: DrawnToken | None = None
    ended: str | None = None
    failed: Exception | None = None


@dataclass(eq=False)
class Line:
    """An answer while it is drawn. events: where its news go. last: the token drawn last. count: of tokens so far.
    is_over: it is drawn no further; a client that hangs up sets it."""

    order: Order
    place: int
    events: SimpleQueue[Event]
    last: int = -1
    count: int = 0
    is_over: bool = False
    _uniform_R: torch.Tensor | None = field(default=None, repr=False)

    @property
    def uniform(self) -> float:
        """The number by which the next token is drawn: of the line's own seed."""
        if self._uniform_R is None:
            self._uniform_R = uniform_streams([self.order.seed], self.order.sampling.max_new_tokens, 1)[0]
        return float(self._uniform_R[self.count])

    def take(self, drawn: DrawnToken) -> None:
        """Take the next token."""
        if self.is_over:
            return
        self.last, self.count = drawn.token, self.count + 1
        self.events.put(Event(self.place, token=drawn))
        if self.last in self.order.ends:
            self._end(STOP)
        elif self.count == self.order.sampling.max_new_tokens:
            self._end(LENGTH)

    def _end(self, ended: str) -> None:
        self.is_over = True
        self.events.put(Event(self.place, ended=ended))

    def fail(self, problem: Exception) -> None:
        """There will be no further token."""
        if not self.is_over:
            self.is_over = True
            self.events.put(Event(self.place, failed=problem))


class Rows(Protocol):
    """Draws lines, a token of each at a time. lines: those that are drawn."""

    lines: list[Line]

    def join(self, lines: Sequence[Line]) -> None:
        """Draw these too; draw their first tokens."""

    def step(self) -> None:
        """Draw the next token of each line."""

    def leave(self) -> None:
        """Draw those that are over no further."""


class TogetherRows:
    """Lines in one batch, each a row of the cache. Samples of a prompt compute it once, if they join together."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._rows: RaggedRows | None = None
        self.lines: list[Line] = []

    def join(self, lines: Sequence[Line]) -> None:
        firsts = dict[_Prompt, Line]()
        for line in lines:
            firsts.setdefault(_prompt_of(line), line)
        computing, start = sorted(firsts.values(), key=lambda line: line.order.media is not None), len(self.lines)
        copying = [line for line in lines if firsts[_prompt_of(line)] is not line]
        rows = self._rows = self._rows or RaggedRows(self._model)
        rows.add(len(computing))
        prompts, media = ([getattr(line.order, name) for line in computing] for name in ("ids", "media"))
        logits_JV = rows.begin(start, prompts, media)
        if copying:
            places = {_prompt_of(line): place for place, line in enumerate(computing)}
            sources = [*range(len(computing)), *(places[_prompt_of(line)] for line in copying)]
            rows.reorder([*range(start), *(start + source for source in sources)])
            logits_JV = logits_JV[torch.tensor(sources, device=logits_JV.device)]
        joined = [*computing, *copying]
        self.lines += joined
        _draw(logits_JV, joined)

    def step(self) -> None:
        rows = self._rows
        assert rows is not None, "a step is for lines that have joined"
        extent = max(rows.filled) + 1
        rows.make_room(extent)
        token_A, column_A, position_A = torch.tensor(
            [[max(line.last, 0) for line in self.lines], rows.filled, rows.positions], device=self._model.device
        )
        logits_AV = rows.step(token_A, column_A, position_A, extent)
        rows.filled = [filled + 1 for filled in rows.filled]
        _draw(logits_AV, self.lines)

    def leave(self) -> None:
        going = [(row, line) for row, line in enumerate(self.lines) if not line.is_over]
        if len(going) == len(self.lines):
            return
        if not going:
            self._rows = None  # its memory too
        else:
            going = arranged(going)
            assert self._rows is not None
            self._rows.reorder([row for row, _ in going])
        self.lines = [line for _, line in going]


class AloneRows:
    """Lines one beside the other, each drawn for itself: of any family and engine, and slower. They have no
    log-probabilities."""

    def __init__(self, stream: Callable[[Order], Iterator[int]]) -> None:
        """stream: the tokens of an answer, as they are drawn."""
        self._stream = stream
        self._streams: dict[int, Iterator[int]] = {}
        self.lines: list[Line] = []

    def join(self, lines: Sequence[Line]) -> None:
        self.lines += lines
        self._streams |= {id(line): self._stream(line.order) for line in lines}
        self._advance(lines)

    def step(self) -> None:
        self._advance(self.lines)

    def _advance(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if line.is_over:
                continue
            try:
                line.take(DrawnToken(next(self._streams[id(line)])))
            except ThreestepError as problem:
                line.fail(problem)

    def leave(self) -> None:
        self.lines = [line for line in self.lines if not line.is_over]
        going = {id(line) for line in self.lines}
        self._streams = {key: stream for key, stream in self._streams.items() if key in going}


def _prompt_of(line: Line) -> _Prompt:
    """The prompt of a line, which is computed once also for several of them."""
    return line.order.ids, id(line.order.media)


def _draw(logits_AV: torch.Tensor, lines: Sequence[Line]) -> None:
    """Give each line its next token. Lines with the same settings are drawn together."""
    groups = dict[Any, list[int]]()
    for row, line in enumerate(lines):
        sampling = line.order.sampling
        cuts = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.bad_words)
        key = (sampling.temperature, *cuts, line.order.alternatives)
        groups.setdefault(key, []).append(row)
    for rows in groups.values():
        own_AV = logits_AV if len(rows) == len(lines) else logits_AV[torch.tensor(rows, device=logits_AV.device)]
        _draw_group(own_AV, [lines[row] for row in rows])


def _draw_group(logits_AV: torch.Tensor, lines: Sequence[Line]) -> None:
    order = lines[0].order
    uniform_A = torch.tensor(
        [0.0 if line.is_over else line.uniform for line in lines], dtype=torch.float64, device=logits_AV.device
    )
    token_A, logprob_A = draw(logits_AV, uniform_A, order.sampling, _never_drawn(logits_AV, order.sampling))
    drawn = [DrawnToken(token) for token in token_A.tolist()]
    if order.alternatives is not None:
        logprobs_AV = torch.log_softmax(logits_AV, dim=-1)
        own_A = logprobs_AV.gather(-1, token_A.unsqueeze(1)).squeeze(1).tolist()
        values_AK, ids_AK = logprobs_AV.topk(min(order.alternatives, logprobs_AV.shape[-1]), dim=-1)
        drawn = [
            DrawnToken(each.token, own, tuple(zip(ids, values, strict=True)))
            for each, own, ids, values in zip(drawn, own_A, ids_AK.tolist(), values_AK.tolist(), strict=True)
        ]
    for line, each, is_bad in zip(lines, drawn, logprob_A.isnan().tolist(), strict=True):
        if is_bad:
            line.fail(ThreestepError("the model's logits are NaN, so no token can be sampled; try another --dtype"))
        else:
            line.take(each)


def _never_drawn(logits_AV: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
    """Return bool [A, V], True for bad words of one token; None without any. Here none has several."""
    if not sampling.bad_words:
        return None
    banned_AV = torch.zeros_like(logits_AV, dtype=torch.bool)
    banned_AV[:, [token for (token,) in sampling.bad_words]] = True
    return banned_AV
