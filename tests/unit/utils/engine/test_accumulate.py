"""The order of an inner optimizer step, and its sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from training.utils.contracts.guests import Guest, Guests, GuestStep
from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee, accumulate, on_device
from training.utils.engine.ranks.startup import Ranks

CPU = torch.device("cpu")


class Engine:
    """Notes what it is told in `log`, under its name."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.ranks = name, log, Ranks(0, 0, 1, CPU)

    def __call__(self, rows: Any) -> Any:
        self.log.append(f"{self.name} reads {rows}")

    def train(self) -> None:
        self.log.append(f"{self.name} trains")

    def backward(self, loss: torch.Tensor) -> None:
        assert torch.is_grad_enabled()
        self.log.append(f"{self.name} learns {float(loss.detach()):g}")

    def step(self) -> Any:
        self.log.append(f"{self.name} steps")
        return SimpleNamespace(figures=lambda group: {f"{group}/learning_rate": 0.5})

    def micro_batch(self, rows: str, value: float, **more: Any) -> MicroBatch:
        def loss() -> MicroLoss:
            self.log.append(f"{self.name} forward {rows}{'' if torch.is_grad_enabled() else ' without gradients'}")
            return MicroLoss(torch.tensor(value), {"loss": torch.tensor(value), "rows": 1}, f"read {rows}")

        return MicroBatch(rows, loss, **more)  # type: ignore[arg-type]


class Noting(Guest):
    """Adds `part` to each loss."""

    def __init__(self, name: str, part: float, log: list[str]) -> None:
        self.name, self.part, self.log = name, part, log

    def begin(self, rows, forward, counted):
        self.log.append(f"{self.name} begins {rows}, counted {counted}")
        forward(len(rows) - 1, f"{rows[-1]} again")
        return NotingStep(self)


class NotingStep(GuestStep):
    def __init__(self, guest: Noting) -> None:
        self.guest, self.parts = guest, 0.0

    @property
    def sums(self):
        return {"parts": self.parts}

    def loss_part(self, rows, read):
        assert read == f"read {rows}"
        self.parts += self.guest.part
        return self.guest.part

    def after_backward(self, read, prepared):
        self.guest.log.append(f"{self.guest.name} after {read}, {prepared}")

    def end(self, group, totals):
        return {f"{group}/{self.guest.name}": totals["parts"]}


def test_the_order_is_that_of_the_contract():
    log: list[str] = []
    one, two = Engine("one", log), Engine("two", log)
    guests = Guests([Noting("x", 0.25, log)])
    batches = [
        one.micro_batch("a", 1.0, for_guests=("prepared",)),
        one.micro_batch("b", 2.0, forward=lambda rows: log.append(f"other forward {rows}")),
        one.micro_batch("c", 4.0, learns=False),
    ]
    trainees = [Trainee("first", one, batches, guests, (7,)), Trainee("second", two, [two.micro_batch("a", 8.0)])]
    totals, figures = accumulate(trainees, {"tokens": 3.0})
    assert log == [
        "one trains", "x begins ['a', 'b'], counted 7", "other forward b again", "two trains",
        "one forward a", "one learns 1.25", "x after read a, prepared", "two forward a", "two learns 8",
        "one forward b", "one learns 2.25", "x after read b, None", "one forward c without gradients",
        "one steps", "two steps",
    ]  # fmt: skip
    assert totals == {"loss": 15.0, "rows": 4.0, "tokens": 3.0}  # without the guests' own
    assert figures == {"first/learning_rate": 0.5, "second/learning_rate": 0.5, "first/x": 0.5}


def test_guests_of_two_models_have_sums_of_their_own():
    log: list[str] = []
    trainees = [
        Trainee(name, engine := Engine(name, log), [engine.micro_batch("a", 1.0)], Guests([Noting("x", part, log)]))
        for name, part in (("actor", 0.5), ("critic", 2.0))
    ]
    figures = accumulate(trainees).figures
    assert figures["actor/x"] == 0.5 and figures["critic/x"] == 2.0


def test_what_guests_prepared_moves_too():
    nothing: Any = None
    inner, plain = (MicroBatch(torch.zeros(1), nothing) for _ in range(2))
    batch = MicroBatch(torch.zeros(2), nothing, for_guests=((inner,), None))
    moved, alone = on_device([batch, plain], torch.device("meta"))
    assert moved.rows.is_meta and moved.for_guests[0][0].rows.is_meta and moved.for_guests[1] is None
    assert alone.rows.is_meta


def test_sums_are_of_float64_and_hold_no_graph():
    weight = torch.tensor(1.0, requires_grad=True)
    engine = Engine("one", [])
    small = MicroBatch(None, lambda: MicroLoss(weight * 2**-30, {"loss": weight * 2**-30}))  # type: ignore[arg-type]
    large = MicroBatch(None, lambda: MicroLoss(weight, {"loss": weight}))  # type: ignore[arg-type]
    totals, _ = accumulate([Trainee("train", engine, [large, small])])  # type: ignore[arg-type]
    assert totals == {"loss": 1.0 + 2**-30}
