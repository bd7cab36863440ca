"""How a command line with flags of DeepSpeed-Chat is read."""

from __future__ import annotations

import pytest

from training.utils.run.errors import ThreestepError
from training.utils.run.old_flags import Needless, Refused, Renamed, translated

TABLE = {
    "--gone": Needless("it is in the log", takes_value=False),
    "--one": Needless("there is one"),
    "--old": Renamed("--new", "an older spelling"),
    "--refused": Refused("was replaced by --other"),
}


def test_words_between_stay_in_their_order():
    words, lines = translated("--data_path a b --old=3 --gone --seed 1 --old 4 --one 1".split(), TABLE)
    assert words == "--data_path a b --new 3 --seed 1 --new 4".split()
    assert lines == [
        "--old is read as --new 3: an older spelling",
        "--gone is not needed: it is in the log",
        "--old is read as --new 4: an older spelling",
        "--one is not needed: there is one",
    ]


def test_mistakes_are_told_at_once():
    with pytest.raises(ThreestepError) as told:
        translated("--refused 3 --old --gone".split(), TABLE)
    assert [line.strip() for line in str(told.value).splitlines()[1:]] == [
        "- --refused was replaced by --other",
        "- --old expects a value after it, got none",
    ]
