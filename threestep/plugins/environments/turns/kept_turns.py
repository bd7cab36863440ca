"""Turns of conversations drawn by a transformers model that keeps what it has computed.

A conversation has a row of the cache from its first turn to its last, also while its environment answers. What was said
in between is computed in one forward of all rows that join the batch at that time: no token is computed twice, and
samples of a prompt compute it once. Rows whose turn is drawn stand before those that wait, so that a step is of them
alone. Whatever is in the cache is found by its tokens: a conversation that goes on otherwise than it was drawn computes
what is new from there on.

A active rows, J rows that join them, t tokens between two looks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.ragged.check import why_not_in_turns
from threestep.plugins.ragged.ragged_rows import RaggedRows, arranged
from training.utils.contracts.drawing import DrawnTurn, NextTurn, TurnDrawing, Turns
from training.utils.contracts.rollout import check_numbers
from training.utils.generation.decoding.drawn import BadWords, draw_several, uniform_streams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.rollout_engine import Sampling
    from training.utils.generation.decoding.decoding import DecodeWay
    from training.utils.generation.decoding.drawn import StopStrings
    from training.utils.models.own_forward import OwnForward

_IN_ROUNDS = "rereads each whole conversation in every turn, and all conversations wait for the slowest answer"


class TurnsKept(TurnDrawing):
    """Turns that keep what they have computed. fixed: see `RaggedRows`; None where the model cannot keep it."""

    def __init__(self, fixed: bool | None = None) -> None:
        self._fixed = fixed

    def check(self, model: PreTrainedModel, own: OwnForward, way: DecodeWay, obstacle: str | None) -> list[str]:
        """See `TurnDrawing`."""
        reason = obstacle
        if reason is None and not way.masks_are_ours:
            reason = "the model family makes its own masks"
        reason = reason or why_not_in_turns(model, own, way.fixed)
        self._fixed = way.fixed if reason is None else None
        return [] if reason is None else [f"warning: {type(model).__name__} {_IN_ROUNDS}: {reason}"]

    def open(
        self, model: PreTrainedModel, sampling: Sampling, stop: StopStrings | None, end_check_tokens: int
    ) -> KeptTurns | None:
        """See `TurnDrawing`."""
        if self._fixed is None:
            return None
        return KeptTurns(model, sampling, stop, end_check_tokens, fixed=self._fixed)


@dataclass(eq=False)
class _Line:
    """A conversation. turn: the present one, or the next. row: of the cache. number: of its stream. held: the tokens
    that the row has computed. drawn: of the turn; the last of them is not computed yet. has_left: no turn follows."""

    turn: NextTurn
    number: int
    row: int = -1
    held: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_left: bool = False

    def keep_beginning(self) -> None:
        """Hold what is computed of the turn's tokens, but for the last, behind which the turn is drawn."""
        same, most = 0, min(len(self.held), len(self.turn.ids) - 1)
        while same < most and self.held[same] == self.turn.ids[same]:
            same += 1
        del self.held[same:]


class _BadWords(BadWords):
    """Those behind texts that are given whole: nothing stands before them."""

    def __init__(self, words: Sequence[Sequence[int]], device: torch.device) -> None:
        nothing = torch.empty(1, 0, dtype=torch.int64, device=device)
        super().__init__(words, nothing, nothing.bool())

    def recent_of(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return int64 [A, K], the last tokens of texts."""
        (nothing,) = self.prompt_ends_BK.tolist()
        reach = len(nothing)
        ends = [[*nothing, *ids[max(0, len(ids) - reach) :]] for ids in texts]
        last = [ids[len(ids) - reach :] for ids in ends]
        return torch.tensor(last, dtype=torch.int64, device=self.prompt_ends_BK.device).view(len(texts), reach)


class KeptTurns(Turns):
    """See Turns."""

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling,
        stop: StopStrings | None,
        end_check_tokens: int,
        *,
        fixed: bool,
    ) -> None:
        """end_check_tokens: between two looks at which turns are over. fixed: see `RaggedRows`, also for ValueError."""
        self._rows, self._name, self._device = RaggedRows(model, fixed), type(model).__name__, model.device
        self._sampling, self._stop, self._every, self._fixed = sampling, stop, end_check_tokens, fixed
        self._ends = sampling.end_token_ids
        self._bad_words = _BadWords(sampling.bad_words, self._device) if sampling.bad_words else None
        self._lines: list[_Line] = []  # by row
        self._active = 0  # how many of them are drawn
        self._captured = 0  # how many rows a captured step has
        self._joining: list[_Line] = []
        self._of_key: dict[Any, _Line] = {}
        self._uniform_BR = torch.empty(0, sampling.max_new_tokens, dtype=torch.float64, device=self._device)

    @property
    def is_drawing(self) -> bool:
        return bool(self._active or self._joining)

    def add(self, turn: NextTurn) -> None:
        line = self._of_key.get(turn.key) or _Line(turn, len(self._of_key))
        self._of_key[turn.key] = line
        line.turn, line.drawn, line.logprobs = turn, [], []
        self._joining.append(line)

    def drop(self, key: Any) -> None:
        self._of_key[key].has_left = True

    @torch.no_grad()
    def advance(self) -> list[DrawnTurn]:
        return self._joined() if self._joining else self._drawn()

    def _joined(self) -> list[DrawnTurn]:
        """Compute what is new of the lines that join, and draw the first token of each."""
        joining, self._joining = self._joining, []
        source = _sources(joining)
        for line in joining:
            if line.row < 0:
                line.row = len(self._rows.filled)
                self._rows.add(1)
        computing = [line for line in joining if source[line] is line]
        copying = [line for line in joining if source[line] is not line]
        waiting = [line for line in self._lines[self._active :] if line not in source]
        first, self._active = self._active, self._active + len(joining)
        self._arrange(self._lines[:first], computing, copying, waiting)
        self._draw_streams(joining)
        computing, lines = self._lines[first : first + len(computing)], self._lines[first : self._active]
        for line in computing:
            line.keep_beginning()
            self._rows.filled[line.row] = len(line.held)
        logits_JV = self._rows.give(first, [line.turn.ids[len(line.held) :] for line in computing])
        if copying:
            rows = [source.get(line, line).row for line in self._lines]
            self._rows.reorder(rows)
            logits_JV = logits_JV[torch.tensor(rows[first : self._active], device=self._device) - first]
        for line in lines:
            line.held = list(line.turn.ids)
        place_2J = torch.tensor([[line.number, 0] for line in lines], device=self._device).T
        return self._taken(lines, *self._draw(lines, place_2J, 1, lambda *_: logits_JV))

    def _draw_streams(self, lines: Sequence[_Line]) -> None:
        """Draw the numbers by which the lines' turns are drawn."""
        new = len(self._of_key) - len(self._uniform_BR)
        if new:
            self._uniform_BR = torch.nn.functional.pad(self._uniform_BR, (0, 0, 0, new))
        most = max(line.turn.most_tokens for line in lines)
        streams_JR = uniform_streams([line.turn.seed for line in lines], most, len(lines))
        numbers_J = torch.tensor([line.number for line in lines], device=self._device)
        self._uniform_BR[numbers_J, :most] = streams_JR.to(self._device)

    def _drawn(self) -> list[DrawnTurn]:
        """Draw further tokens of the active lines."""
        lines, filled = self._lines[: self._active], self._rows.filled
        count = min(self._every, *(line.turn.most_tokens - len(line.drawn) for line in lines))
        stepped = self._lines[: self._rows_of_step()]
        extent = max(filled[: len(stepped)]) + 1
        self._rows.make_room(extent + count - 1)
        # Lines that wait and take part in a captured step write where their next tokens will be.
        given = [[line.number, len(line.drawn), line.drawn[-1], filled[line.row], filled[line.row]] for line in lines]
        given += [[line.number, 0, 0, filled[line.row], 0] for line in stepped[len(lines) :]]
        number_A, start_A, last_A, column_A, position_A = torch.tensor(given, device=self._device).T.contiguous()

        def next_logits(place: int, token_A: torch.Tensor | None) -> torch.Tensor:
            token_A = last_A if token_A is None else token_A
            return self._rows.step(token_A, column_A + place, position_A + place, extent + place)

        self.steps += count
        drawn = self._draw(stepped, torch.stack([number_A, start_A]), count, next_logits)
        return self._taken(lines, *drawn)

    def _rows_of_step(self) -> int:
        """The number of rows in the next step: the active ones, and in a captured step, which is made anew for each
        number of rows, some that wait."""
        if not self._fixed:
            return self._active
        if self._active > self._captured:
            self._captured = len(self._lines)
        elif 2 * self._active <= self._captured:
            self._captured = self._active
        return min(self._captured, len(self._lines))

    def _draw(
        self,
        lines: Sequence[_Line],
        place_2A: torch.Tensor,
        count: int,
        next_logits: Callable[[int, torch.Tensor | None], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count` tokens of each line, and their log-probabilities. place_2A: the number of each line, and where
        in its stream it is. next_logits: see `draw_several`."""
        number_A1, start_A1 = place_2A.unsqueeze(2)
        uniform_At = self._uniform_BR[number_A1, start_A1 + torch.arange(count, device=self._device)]
        recent_AK = None
        if self._bad_words is not None:
            recent_AK = self._bad_words.recent_of([[*line.turn.ids, *line.drawn] for line in lines])
        return draw_several(uniform_At, self._sampling, next_logits, self._bad_words, recent_AK=recent_AK)

    def _taken(self, lines: Sequence[_Line], token_At: torch.Tensor, logprob_At: torch.Tensor) -> list[DrawnTurn]:
        """Give the lines, the first of those that drew, what they have drawn; return the turns that are over, which are
        no longer active."""
        check_numbers(logprob_At[: len(lines)], self._name)
        over = list[DrawnTurn]()
        for line, ids, logprobs in zip(lines, token_At.tolist(), logprob_At.tolist(), strict=False):
            ended = self._take(line, ids)
            line.logprobs += logprobs[: len(line.drawn) - len(line.logprobs)]
            self._rows.filled[line.row] = len(line.held)
            if ended or len(line.drawn) == line.turn.most_tokens:
                over.append(DrawnTurn(line.turn.key, line.drawn, line.logprobs, ended))
        if over:
            keys = {turn.key for turn in over}
            active, waiting = self._lines[: self._active], self._lines[self._active :]
            going = [line for line in active if line.turn.key not in keys]
            self._active = len(going)
            self._arrange(going, [line for line in active if line.turn.key in keys] + waiting)
        return over

    def _take(self, line: _Line, ids: Sequence[int]) -> bool:
        """Give a line tokens, up to one that ends its turn; return whether one does."""
        for token in ids:
            if line.drawn:
                line.held.append(line.drawn[-1])
            line.drawn.append(token)
            if token in self._ends or (self._stop is not None and self._stop.completed(line.drawn)):
                return True
        return False

    def _arrange(self, *sections: Sequence[_Line]) -> None:
        """Let the lines of the sections have the rows, one section behind the other; of each as many as can keep their
        place. Those that have left are left out."""
        wanted = list[_Line]()
        for section in sections:
            first, going = len(wanted), [line for line in section if not line.has_left]
            far = len(self._rows.filled)
            wanted += [line for _, line in arranged([((line.row - first) % far, line) for line in going])]
        self._rows.reorder([line.row for line in wanted])
        for row, line in enumerate(wanted):
            line.row = row
        self._lines = wanted


def _sources(lines: Sequence[_Line]) -> dict[_Line, _Line]:
    """Return for each line which one computes its tokens: of those that begin alike the first."""
    firsts = dict[tuple[int, ...], _Line]()
    return {line: firsts.setdefault(tuple(line.turn.ids), line) if line.row < 0 else line for line in lines}
