"""Prompts that are chosen by the scores of earlier rollouts.

A user's sampler (`--prompt_sampler`) picks among the dataset's prompts; a user's dataset (`--prompt_dataset`) changes
after each rollout. Both live on rank 0, which sends the rows to the other ranks, so that all see the same prompts even
if the user's code is random.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

from training.step3_ppo.contracts.rollouts import PromptSource
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import call_user
from training.utils.contracts.rows import PromptRow
from training.utils.engine.ranks.collectives import gathered, on_main
from training.utils.layout.order import ShuffledStream

if TYPE_CHECKING:
    import torch

    from training.step3_ppo.contracts.records import LeftOut, Samples
    from training.utils.contracts.rollout import Rollout
    from training.utils.data.build.row_maker import PromptMaker
    from training.utils.engine.ranks.startup import Ranks

State = dict[str, Any]
_Answers = tuple[PromptRow, list[tuple[str, float]]]  # a prompt, its responses and their scores


@dataclass(frozen=True)
class RolloutResults:
    """Results of one rollout of all ranks: one entry per response, responses to one prompt adjacent. Its objects are
    the receiver's, which may change them.

    First those that are trained on; then, with --dynamic_sampling_tries, those that were drawn and scored besides:
    prompts that were replaced since all of their samples score the same, and prompts drawn to replace them that do too.

    rows: the prompts. responses: texts, without the end-of-conversation token.
    """

    rows: list[PromptRow]
    responses: list[str]
    scores: list[float]


# For users to subclass.


class PromptSampler(ABC):
    """Picks the prompts of each rollout; a subclass is given as `--prompt_sampler FILE.py:NAME`.

    With `--prompt_dataset`, `prompts` may grow between two calls. States are what JSON holds, and a fresh sampler with
    the loaded state picks as the saved one would have.
    """

    def __init__(self, prompts: Sequence[PromptRow], seed: int) -> None:
        self.prompts = prompts
        self.seed = seed

    @abstractmethod
    def take(self, first: int, count: int) -> list[int]:
        """Return `count` indices into `prompts`: the prompts at positions first, first + 1, ... of the run. Asked once
        for each position, in order."""

    def update(self, uids: Sequence[str], scores: Sequence[float]) -> None:  # noqa: B027 (some ignore results)
        """See a rollout's results: one uid and one score per response, those of RolloutResults. With
        --dynamic_sampling_tries there are prompts among them that `take` did not return."""

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...


class PromptDataset(Sequence[PromptRow]):
    """A run's prompts, which may change after each rollout; a subclass is given as `--prompt_dataset FILE.py:NAME`.

    `on_batch_end` usually calls `add`. A subclass with more state than the added prompts extends both state methods;
    one that replaces prompts overrides `__len__` and `__getitem__`.
    """

    def __init__(self, prompts: Sequence[PromptRow], maker: PromptMaker, seed: int) -> None:
        self.prompts = prompts
        self.maker = maker
        self.seed = seed
        self._added: list[State] = []
        self._rows: list[PromptRow] = []

    def on_batch_end(self, results: RolloutResults) -> None:
        """Called after each rollout; the next one takes its prompts from those that are here afterwards."""

    def add(self, prompt: Any, ground_truth: Any = None, **columns: Any) -> bool:
        """Add a prompt (text or messages, see `PromptMaker.make`); False if it is left out, e.g. as too long."""
        row = self.maker.make(prompt, ground_truth, -1 - len(self._rows), **columns)
        if row is not None:
            self._rows.append(row)
            self._added.append(deepcopy({"prompt": prompt, "ground_truth": ground_truth, **columns}))
        return row is not None

    def state_dict(self) -> State:
        return {"added": self._added}

    def load_state_dict(self, state: State) -> None:
        self._added, self._rows = [], []
        for item in state["added"]:
            self.add(**item)

    def __len__(self) -> int:
        return len(self.prompts) + len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self.prompts[place] if place < len(self.prompts) else self._rows[place - len(self.prompts)]


class EpochSampler(PromptSampler):
    """Shuffled epochs over a dataset that may change: each takes the prompts that were there when it began, and ends
    early if the dataset has become shorter."""

    def __init__(self, prompts: Sequence[PromptRow], seed: int) -> None:
        super().__init__(prompts, seed)
        self._stream = ShuffledStream(len(prompts), seed)
        self._epoch, self._begin = 0, 0

    def take(self, first: int, count: int) -> list[int]:
        return [self._at(position) for position in range(first, first + count)]

    def _at(self, position: int) -> int:
        rows = self._stream.rows
        if position >= self._begin + rows or len(self.prompts) < rows:
            self._epoch, self._begin, rows = self._epoch + 1, position, len(self.prompts)
            self._stream = ShuffledStream(rows, self.seed)
        return self._stream.take(self._epoch * rows + position - self._begin, 1)[0]

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "begin": self._begin, "rows": self._stream.rows}

    def load_state_dict(self, state: State) -> None:
        self._epoch, self._begin = state["epoch"], state["begin"]
        self._stream = ShuffledStream(state["rows"], self.seed)


# For the trainer: every method is called by all ranks.


@dataclass(eq=False)
class SampledPrompts(PromptSource):
    """Prompts that a sampler picks from a dataset, on rank 0. texts_of: a rollout's responses as text."""

    prompts: Sequence[PromptRow]
    sampler: PromptSampler
    dataset: PromptDataset | None
    texts_of: Callable[[Rollout], Sequence[str]]
    ranks: Ranks

    @property
    def makes_prompts(self) -> bool:  # type: ignore[override]
        return self.dataset is not None

    @property
    def _parts(self) -> dict[str, Any]:
        return {"sampler": self.sampler} | ({} if self.dataset is None else {"dataset": self.dataset})

    def take(self, first: int, count: int) -> list[PromptRow]:
        return on_main(lambda: self._taken(first, count), self.ranks.is_main)

    def _taken(self, first: int, count: int) -> list[PromptRow]:
        indices = call_user(self.sampler.take, first, count)
        rows = range(len(self.prompts))
        if not isinstance(indices, Sequence) or len(indices) != count or not all(index in rows for index in indices):
            raise ThreestepError(
                f"{type(self.sampler).__name__}.take({first}, {count}): expected a list of {count} indices from 0 to "
                f"{len(rows) - 1}, got {str(indices)[:200]}"
            )
        return [self.prompts[index] for index in indices]

    def spare(self, seed: int, first: int, count: int) -> list[PromptRow]:
        return on_main(lambda: super(SampledPrompts, self).spare(seed, first, count), self.ranks.is_main)

    def observe(self, samples: Samples, left_out: Sequence[LeftOut] = ()) -> None:
        # Ranks hold every world_size-th prompt: back into the order of the positions.
        trained = self._answers(samples.rows, samples.rollout, samples.scored.scores_B)
        groups = [group for place in zip(*gathered(trained), strict=True) for group in place]
        others: list[tuple[tuple[int, ...], _Answers]] = []
        for part in left_out:
            others += zip(part.keys, self._answers(part.rows, part.rollout, part.scores_B), strict=True)
        groups += [group for _, group in sorted(chain.from_iterable(gathered(others)), key=lambda each: each[0])]
        entries = [(row, response, score) for row, group in groups for response, score in group]
        on_main(lambda: self._observe(entries), self.ranks.is_main)

    def _answers(self, rows: Sequence[PromptRow], rollout: Rollout, scores_B: torch.Tensor) -> list[_Answers]:
        """Return each prompt with its responses and their scores."""
        scores = scores_B.tolist()
        texts = [""] * len(scores) if self.dataset is None else self.texts_of(rollout)
        answers = list(zip(texts, scores, strict=True))
        each = len(scores) // max(len(rows), 1)
        return [(row, answers[place * each : (place + 1) * each]) for place, row in enumerate(rows)]

    def _observe(self, entries: Sequence[tuple[PromptRow, str, float]]) -> None:
        rows, responses, scores = (list(column) for column in zip(*entries, strict=True))
        call_user(self.sampler.update, [row.uid for row in rows], list(scores))
        if self.dataset is not None:
            copied = [deepcopy(row) for row in rows]  # responses share a prompt's row, which is read again
            call_user(self.dataset.on_batch_end, RolloutResults(copied, responses, scores))

    def state_dict(self) -> State:
        return on_main(lambda: {name: _state_of(part) for name, part in self._parts.items()}, self.ranks.is_main)

    def load_state_dict(self, state: State) -> None:
        _check_parts(state, self._parts)

        def load() -> None:
            for name in reversed(self._parts):  # the dataset first: its length may be the sampler's
                call_user(self._parts[name].load_state_dict, state[name])

        on_main(load, self.ranks.is_main)


def _state_of(part: Any) -> State:
    state = call_user(part.state_dict)
    try:
        copy = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError):
        copy = None
    if copy is None or copy != state:
        raise ThreestepError(
            f"{type(part).__name__}.state_dict must return a dict that JSON restores unchanged (string keys, lists "
            "instead of tuples, finite numbers)"
        )
    return copy  # the part may change its object later


def _check_parts(state: State, parts: dict[str, Any]) -> None:
    if state.keys() != parts.keys():
        neither = "neither --prompt_sampler nor --prompt_dataset"
        saved, mine = (" and ".join(f"a {name}" for name in sorted(names)) or neither for names in (state, parts))
        raise ThreestepError(
            f"the saved run chose its prompts with {saved}, but this run uses {mine}; use the saved run's flags"
        )
