"""Guests and observers of steps: none changes nothing, and several act in the order of their tuple. Rows count their
tokens, and trackers are given names and tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from training.utils.contracts.guests import Guest, Guests, GuestStep
from training.utils.contracts.rows import PromptRow, ResponsesRow, SentenceRow, TextBlock
from training.utils.contracts.run import NOT_OBSERVED, ObservedStep, StepObserver, StepObservers, StepTaken
from training.utils.contracts.trackers import TrackedRun, sample_table


class Named(Guest):
    """Answers everything with its name."""

    def __init__(self, name: str, needs_before: bool = False, guesses: bool = False) -> None:
        self.name, self.needs_before, self.guesses = name, needs_before, guesses

    @property
    def engines(self):
        return {self.name: self}

    def prepare(self, rows):
        return self.name, rows

    def tally(self, documents):
        return self.name, len(documents)

    def forward_kwargs(self, prepared):
        return {self.name: prepared}

    def evaluate(self, read, prepared):
        return {f"{self.name}_sum": torch.tensor(1.0)}

    def evaluated(self, group, totals):
        return {f"{group}/{self.name}": totals[f"{self.name}_sum"]}

    def model_writer(self):
        return lambda folder: folder.append(self.name)

    def lent_guesser(self, model, seed):
        return (lambda: self.name) if self.guesses else None


def test_no_guest_changes_nothing():
    none = Guests()
    assert not none and not none.needs_before and none.engines == {} and none.prepare("rows") == ()
    assert none.forward_kwargs(()) == {} and none.evaluate("read", ()) == {} and none.evaluated("eval", {}) == {}
    assert none.model_writer() is None and none.lent_guesser(None, 0) is None
    guest, step = Guest(), GuestStep()
    assert Guests([guest]).engines == {} and guest.prepare("rows") is None and guest.tally([]) is None
    assert guest.forward_kwargs(None) == {} and guest.evaluate("read", None) == {} and guest.evaluated("eval", {}) == {}
    assert Guests([guest]).model_writer() is None and guest.lent_guesser(None, 0) is None and not guest.why_not_ahead
    assert isinstance(guest.begin([], print, None), GuestStep)
    assert step.sums == {} and step.loss_part("rows", "read") == 0.0 and step.end("train", {}) == {}


def test_several_guests_act_in_their_order():
    guests = Guests([Named("b"), Named("a", needs_before=True, guesses=True)])
    assert guests.needs_before and list(guests.engines) == ["b", "a"]
    prepared = guests.prepare("rows")
    assert prepared == (("b", "rows"), ("a", "rows")) and guests.tally(["one"]) == (("b", 1), ("a", 1))
    assert guests.forward_kwargs(prepared) == {"b": ("b", "rows"), "a": ("a", "rows")}
    totals = {name: float(value) for name, value in guests.evaluate("read", prepared).items()}
    assert guests.evaluated("eval", totals) == {"eval/b": 1.0, "eval/a": 1.0}
    written: list[str] = []
    guests.model_writer()(written)
    assert written == ["b", "a"] and guests.lent_guesser(None, 0)() == "a"


class Observer(StepObserver):
    """Wraps what is trained in its name, and notes what it sees."""

    def __init__(self, name: str, seen: list[tuple[object, ...]]) -> None:
        self.name, self.seen = name, seen

    def begin(self, number, update=None):
        self.seen.append((self.name, number, update))
        return Seen(self)


class Seen(ObservedStep):
    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def watched(self, trainee):
        return f"{self.observer.name}({trainee})"

    def taken(self, step):
        self.observer.seen.append((self.observer.name, step.figures))


STEP = StepTaken(3, {"loss": 1.0}, lambda: [7, 8], update=2)


def test_several_observers_see_a_step_in_their_order():
    seen: list[tuple[object, ...]] = []
    observed = StepObservers([Observer("b", seen), StepObserver(), Observer("a", seen)]).begin(3, 2)
    assert observed.watched("model") == "a(b(model))"
    observed.taken(STEP)
    assert seen == [("b", 3, 2), ("a", 3, 2), ("b", {"loss": 1.0}), ("a", {"loss": 1.0})]
    assert (STEP.kind, STEP.number, STEP.update, [*STEP.row_ids()]) == ("", 3, 2, [7, 8])
    assert StepObservers().begin(3) is NOT_OBSERVED is StepObserver().begin(3, 1)
    assert NOT_OBSERVED.watched(seen) is seen


def test_lengths_count_every_token():
    ids = np.arange(4, dtype=np.int32)
    rows = (SentenceRow(0, ids, ids > 1), PromptRow(0, ids, "", None), TextBlock(0, ids))
    assert [row.length_tokens for row in rows] == [4, 4, 4]
    assert ResponsesRow(0, ids, (ids[:1], ids[:3])).length_tokens == 8


def test_a_prompts_uid_is_of_its_text_and_reference_alone():
    def uid(text, reference=None, row_id=0, **columns):
        return PromptRow(row_id, np.arange(4, dtype=np.int32), text, reference, columns).uid

    assert uid("a", "1") == uid("a", "1", 7, data_source="x") and len(uid("a")) == 16
    assert len({uid("a"), uid("b"), uid("a", "1"), uid("a", 1), uid("a", [1])}) == 5
    assert uid("a", {"x": 1, "y": 2}) == uid("a", {"y": 2, "x": 1})
    # Written down once: what a saved sampler knows by uid must be found again by later releases.
    assert uid("Human: 2 + 3? Assistant:", "5") == "1641188edb45732e"


def test_the_table_of_samples():
    """Columns that some sample has, then each reward's; JSON stands for what is neither number nor text."""
    first = {"prompt": "p", "response": "r", "reward": 1.0, "sample": 0, "ground_truth": ["a"], "reward/rule": 1.0}
    samples = [
        {**first, "step": 3},
        {"prompt": "p", "response": "s", "reward": 0.5, "sample": 1, "ground_truth": None, "reward/rule/key": 2.0},
        {"prompt": "q", "response": "t", "reward": 0.0, "sample": 0, "check": 1.0},
    ]
    columns, rows = sample_table(samples, 2)
    assert columns == ["prompt", "sample", "response", "ground_truth", "reward", "reward/rule", "reward/rule/key"]
    assert rows == [["p", 0, "r", '["a"]', 1.0, 1.0, None], ["p", 1, "s", None, 0.5, None, 2.0]]
    assert "check" in sample_table(samples, 3)[0] and sample_table([], 8) == ([], [])
    assert TrackedRun(Path("runs/quickstart/sft"), {"run_name": None}, 8).name == "quickstart/sft"
    assert TrackedRun(Path("runs/sft"), {"run_name": "mine"}, 8).name == "mine"
