"""Which prompts a rollout takes, and who is told what became of them.

By default they are the dataset's, in shuffled epochs: a function of the position and the seed. A sampler of the user's
(`--prompt_sampler`) chooses among them by what earlier rollouts scored, a dataset of the user's (`--prompt_dataset`)
changes after each. Both live on rank 0, which sends the rows to the other ranks: all see the same prompts, also where
the user's code draws at random. Knows nothing of models.
"""

from __future__ import annotations

import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from training.step3_ppo.records import Experience
from training.utils.data.phases import PromptRow
from training.utils.data.prompt_maker import PromptMaker
from training.utils.engine.collectives import gathered, on_main
from training.utils.engine.startup import Ranks
from training.utils.layout.order import ShuffledStream
from training.utils.run.errors import ThreestepError
from training.utils.run.user_files import load_named

Given = TypeVar("Given")
State = dict[str, Any]


@dataclass(frozen=True)
class RolloutResults:
    """What became of the prompts of one rollout of all ranks: one entry a response, responses to one prompt adjacent.

    rows: the prompts. responses: texts, without the end-of-conversation token.
    """

    rows: list[PromptRow]
    responses: list[str]
    scores: list[float]


# What a user subclasses.


class PromptSampler(ABC):
    """Chooses the prompts of each rollout; a subclass is given as `--prompt_sampler FILE.py:NAME`.

    `prompts` may grow between two calls, where `--prompt_dataset` is given. States are what JSON holds, and a fresh
    sampler with the loaded state chooses as the saved one would have.
    """

    def __init__(self, prompts: Sequence[PromptRow], seed: int) -> None:
        self.prompts = prompts
        self.seed = seed

    @abstractmethod
    def take(self, first: int, count: int) -> list[int]:
        """Return `count` indices into `prompts`: the prompts at positions first, first + 1, ... of the run. Asked once
        for each position, in order."""

    def update(self, uids: Sequence[str], scores: Sequence[float]) -> None:  # noqa: B027 (some need no results)
        """See a rollout's results: one uid and one score a response."""

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...


class PromptDataset(Sequence[PromptRow]):
    """A run's prompts, which may change after each rollout; a subclass is given as `--prompt_dataset FILE.py:NAME`.

    `on_batch_end` mostly calls `add`. A subclass that keeps more than the added prompts extends both state methods;
    one that replaces prompts overrides `__len__` and `__getitem__`.
    """

    def __init__(self, prompts: Sequence[PromptRow], maker: PromptMaker, seed: int) -> None:
        self.prompts = prompts
        self.maker = maker
        self.seed = seed
        self._added: list[State] = []
        self._rows: list[PromptRow] = []

    def on_batch_end(self, results: RolloutResults) -> None:
        """Called after each rollout; the prompts of the next one are those that stand here afterwards."""

    def add(self, prompt: Any, ground_truth: Any = None, **columns: Any) -> bool:
        """Add a prompt (text or messages, see `PromptMaker.make`); False where it is left out, being too long, say."""
        row = self.maker.make(prompt, ground_truth, -1 - len(self._rows), **columns)
        if row is not None:
            self._rows.append(row)
            self._added.append({"prompt": prompt, "ground_truth": ground_truth, **columns})
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
    """Shuffled epochs over a dataset that may change: each epoch is over the prompts that were there when it began. It
    ends early where the dataset has become shorter."""

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


# What the trainer asks and tells. Every method is called by all ranks.


class PromptSource(ABC):
    """Gives the prompts of every rollout. Its state is what JSON holds, the same on every rank."""

    @abstractmethod
    def take(self, first: int, count: int) -> list[PromptRow]:
        """The prompts at positions first .. first + count - 1 of the run, of all ranks together."""

    @abstractmethod
    def spare(self, seed: int, first: int, count: int) -> list[PromptRow]:
        """Prompts in place of others: those at positions first .. of all there are, in shuffled epochs by `seed`."""

    @abstractmethod
    def tell(self, rows: Sequence[PromptRow], experience: Experience) -> None:
        """See what became of this rank's prompts: `experience` has the same number of responses to each, adjacent."""

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...


class ShuffledPrompts(PromptSource):
    """Shuffled epochs; nothing to remember but the position, which the trainer knows."""

    def __init__(self, prompts: Sequence[PromptRow], seed: int) -> None:
        self._prompts = prompts
        self._stream = ShuffledStream(len(prompts), seed)

    def take(self, first: int, count: int) -> list[PromptRow]:
        return [self._prompts[row] for row in self._stream.take(first, count)]

    def spare(self, seed: int, first: int, count: int) -> list[PromptRow]:
        return _shuffled(self._prompts, seed, first, count)

    def tell(self, rows: Sequence[PromptRow], experience: Experience) -> None:
        pass

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        _same_parts(state, {})


class ChosenPrompts(PromptSource):
    """Prompts that a sampler chooses from a dataset, on rank 0. `decode`: token ids to text."""

    def __init__(
        self,
        prompts: Sequence[PromptRow],
        sampler: PromptSampler,
        dataset: PromptDataset | None,
        decode: Callable[[list[int]], str],
        end_token_id: int,
        ranks: Ranks,
    ) -> None:
        self._prompts = prompts
        self._sampler = sampler
        self._dataset = dataset
        self._decode = decode
        self._end_token_id = end_token_id
        self._ranks = ranks
        self._parts: dict[str, Any] = {"sampler": sampler} | ({} if dataset is None else {"dataset": dataset})

    def take(self, first: int, count: int) -> list[PromptRow]:
        return self._on_main(lambda: self._taken(first, count))

    def _taken(self, first: int, count: int) -> list[PromptRow]:
        chosen = _called(self._sampler.take, first, count)
        rows = range(len(self._prompts))
        if not isinstance(chosen, Sequence) or len(chosen) != count or not all(index in rows for index in chosen):
            raise ThreestepError(
                f"{type(self._sampler).__name__}.take({first}, {count}): expected a list of {count} indices from 0 to "
                f"{len(rows) - 1}, got {str(chosen)[:200]}"
            )
        return [self._prompts[index] for index in chosen]

    def spare(self, seed: int, first: int, count: int) -> list[PromptRow]:
        return self._on_main(lambda: _shuffled(self._prompts, seed, first, count))

    def tell(self, rows: Sequence[PromptRow], experience: Experience) -> None:
        parts = gathered(self._groups(rows, experience))
        # Ranks hold every world_size-th prompt: back into the order of the positions.
        groups = [group for place in zip(*parts, strict=True) for group in place]
        entries = [(row, response, score) for row, answers in groups for response, score in answers]
        self._on_main(lambda: self._told(entries))

    def _groups(
        self, rows: Sequence[PromptRow], experience: Experience
    ) -> list[tuple[PromptRow, list[tuple[str, float]]]]:
        """Each prompt of this rank, with the text and score of each response."""
        rollout, scores = experience.rollout, experience.scores_B.tolist()
        each = len(scores) // len(rows)
        texts = [""] * len(scores)
        if self._dataset is not None:
            texts = rollout.texts(lambda ids: self._decode(ids.tolist()), self._end_token_id)
        told = list(zip(texts, scores, strict=True))
        return [(row, told[place * each : (place + 1) * each]) for place, row in enumerate(rows)]

    def _told(self, entries: Sequence[tuple[PromptRow, str, float]]) -> None:
        rows, responses, scores = (list(column) for column in zip(*entries, strict=True))
        _called(self._sampler.update, [row.uid for row in rows], scores)
        if self._dataset is not None:
            _called(self._dataset.on_batch_end, RolloutResults(rows, responses, scores))

    def state_dict(self) -> State:
        return self._on_main(lambda: {name: _state_of(part) for name, part in self._parts.items()})

    def load_state_dict(self, state: State) -> None:
        _same_parts(state, self._parts)

        def load() -> None:
            for name in reversed(self._parts):  # the dataset first: its length may be the sampler's
                _called(self._parts[name].load_state_dict, state[name])

        self._on_main(load)

    def _on_main(self, act: Callable[[], Given]) -> Given:
        return on_main(act, self._ranks.is_main)


def _shuffled(prompts: Sequence[PromptRow], seed: int, first: int, count: int) -> list[PromptRow]:
    return [prompts[row] for row in ShuffledStream(len(prompts), seed).take(first, count)]


def open_prompt_source(
    prompts: Sequence[PromptRow],
    sampler_address: str | None,
    dataset_address: str | None,
    make_maker: Callable[[], PromptMaker],
    decode: Callable[[list[int]], str],
    end_token_id: int,
    seed: int,
    ranks: Ranks,
) -> PromptSource:
    """The source that the flags ask for; ThreestepError where FILE.py:NAME stands for no class of the right kind."""
    if sampler_address is None and dataset_address is None:
        return ShuffledPrompts(prompts, seed)
    dataset = None
    if dataset_address is not None:
        dataset = _called(_class_of(dataset_address, "--prompt_dataset", PromptDataset), prompts, make_maker(), seed)
    offered = prompts if dataset is None else dataset
    sampler_class: Any = EpochSampler
    if sampler_address is not None:
        sampler_class = _class_of(sampler_address, "--prompt_sampler", PromptSampler)
    return ChosenPrompts(offered, _called(sampler_class, offered, seed), dataset, decode, end_token_id, ranks)


def _class_of(address: str, flag: str, kind: type) -> Any:
    found = load_named(address, flag)
    if not isinstance(found, type) or not issubclass(found, kind):
        raise ThreestepError(f"{flag}: '{address}' is no class that builds on {kind.__module__}.{kind.__name__}")
    missing = getattr(found, "__abstractmethods__", ())
    if missing:
        raise ThreestepError(f"{flag}: '{address}' has to define {', '.join(sorted(missing))}")
    return found


def _called(function: Callable[..., Given], *arguments: Any) -> Given:
    """Call the user's code: what it raises becomes a sentence with its place, which can be sent to all ranks."""
    try:
        return function(*arguments)
    except ThreestepError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ThreestepError(
            f"{function.__qualname__} raised {type(error).__name__}: {error} ({Path(place.filename).name}, line "
            f"{place.lineno})"
        ) from error


def _state_of(part: Any) -> State:
    state = _called(part.state_dict)
    try:
        copy = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError):
        copy = None
    if copy is None or copy != state:
        raise ThreestepError(
            f"{type(part).__name__}.state_dict: expected a dict that comes back from JSON as it was (keys of text, "
            "lists for tuples, finite numbers)"
        )
    return copy  # the part may go on writing into its own


def _same_parts(state: State, parts: dict[str, Any]) -> None:
    if state.keys() != parts.keys():
        saved, mine = (" and ".join(sorted(names)) or "neither" for names in (state, parts))
        raise ThreestepError(
            f"the saved state is of --prompt_sampler or --prompt_dataset as {saved}, this run's of {mine}; give the "
            "flags that the saved run had"
        )
