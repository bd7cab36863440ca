"""Guests: none changes nothing, and several act in the order of their tuple."""

from __future__ import annotations

import torch

from training.utils.contracts.guests import Guest, Guests, GuestStep


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


def test_several_act_in_their_order():
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
