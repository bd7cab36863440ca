"""What is made ahead is what would be made now; errors and ends are clean."""

from __future__ import annotations

import threading

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.run.ahead import Ahead


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "threestep ahead"]


@pytest.mark.parametrize("in_background", [True, False])
def test_each_thing_is_made_once_and_by_a_thread_if_asked(in_background):
    made: list[tuple[int, bool]] = []

    def make(item: int) -> int:
        made.append((item, threading.current_thread() is threading.main_thread()))
        return 10 * item

    ahead: Ahead[int, int] = Ahead(make, in_background)
    found = []
    for item in range(4):
        found.append(ahead.made(item))
        if item < 3:
            ahead.begin(item + 1)
    ahead.close()
    assert found == [0, 10, 20, 30] and names() == []
    assert made == [(item, not in_background or item == 0) for item in range(4)]


def test_another_item_than_was_begun_is_made_now():
    ahead: Ahead[int, int] = Ahead(lambda item: -item, True)
    ahead.begin(1)
    assert ahead.made(2) == -2 and ahead.made(1) == -1


def test_an_error_of_the_thread_reaches_the_loop_as_it_was_raised():
    def fail(item: int) -> int:
        raise ThreestepError(f"row {item} is broken; mend it")

    ahead: Ahead[int, int] = Ahead(fail, True)
    ahead.begin(7)
    with pytest.raises(ThreestepError, match="row 7 is broken; mend it"):
        ahead.made(7)


def test_closing_waits_for_the_thread():
    going = threading.Event()
    ahead: Ahead[int, bool] = Ahead(lambda item: going.wait(10.0), True)
    ahead.begin(1)
    assert names() == ["threestep ahead"]
    threading.Timer(0.05, going.set).start()
    ahead.close()
    assert names() == []
