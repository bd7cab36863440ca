"""Step observers: none changes nothing and costs nothing, and several see a step in the order of their tuple."""

from __future__ import annotations

from training.utils.contracts.run import NOT_OBSERVED, ObservedStep, StepObserver, StepObservers, StepTaken


class Named(StepObserver):
    """Wraps what is trained in its name, and notes what it sees."""

    def __init__(self, name: str, seen: list[tuple[object, ...]]) -> None:
        self.name, self.seen = name, seen

    def begin(self, number, update=None):
        self.seen.append((self.name, number, update))
        return NamedStep(self)


class NamedStep(ObservedStep):
    def __init__(self, observer: Named) -> None:
        self.observer = observer

    def watched(self, trainee):
        return f"{self.observer.name}({trainee})"

    def taken(self, step):
        self.observer.seen.append((self.observer.name, step.figures))


STEP = StepTaken(3, {"loss": 1.0}, lambda: [7, 8], update=2)


def test_no_observer_changes_nothing():
    observed = StepObservers().begin(3)
    assert observed is NOT_OBSERVED is StepObserver().begin(3, 1)
    trainee = object()
    assert observed.watched(trainee) is trainee
    observed.taken(STEP)


def test_several_see_a_step_in_their_order():
    seen: list[tuple[object, ...]] = []
    observed = StepObservers([Named("b", seen), StepObserver(), Named("a", seen)]).begin(3, 2)
    assert observed.watched("model") == "a(b(model))"
    observed.taken(STEP)
    assert seen == [("b", 3, 2), ("a", 3, 2), ("b", {"loss": 1.0}), ("a", {"loss": 1.0})]
    assert (STEP.kind, STEP.number, STEP.update, [*STEP.row_ids()]) == ("", 3, 2, [7, 8])
