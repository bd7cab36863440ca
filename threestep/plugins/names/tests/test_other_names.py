"""How a command line with flags of DeepSpeed-Chat is read."""

from __future__ import annotations

import pytest

from threestep.plugins.names.other_names import Needless, Refused, Renamed, Same, translated
from training.utils.base.errors import ThreestepError

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


MORE = {
    "--on": Renamed("--new", takes_value=False, words=lambda value, given: ["--new", "1"]),
    "--both": Renamed("--new", takes_value=False, reads_false=True, words=lambda value, given: ["--new", value]),
    "--never": Refused("is not built", takes_value=False),
    "--names": Renamed("--new", takes_list=True, words=lambda value, given: ["--new", ",".join(value.split())]),
    "--total": Renamed(
        "--new N --length inf", words=lambda value, given: ["--new", value, "--length", "inf"], overrides=("--length",)
    ),
    "--ours": Same(spelled=lambda words: [word.upper() for word in words]),
    "--other": Renamed("--new"),
}


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("--on --seed 1", "--new 1 --seed 1"),
        ("--on True --seed 1", "--new 1 --seed 1"),
        ("--on=false --seed 1", "--seed 1"),
        ("--on 3", "--new 1 3"),  # which argparse refuses
        ("--both no", "--new no"),
        ("--never false", ""),
        ("--names a b --seed 1", "--new a,b --seed 1"),
        ("--length 3 --total 7 --length 4", "--length 3 --new 7 --length 4 --length inf"),
        ("--ours a b", "--ours A B"),
        ("--ours A", "--ours A"),
        ("--a=--b --other=--c", "--a=--b --new --c"),
    ],
)
def test_switches_lists_and_values(typed, read):
    assert translated(typed.split(), MORE)[0] == read.split()


def test_two_flags_that_are_read_as_one_agree_or_are_refused():
    assert translated("--new 3 --other 3".split(), MORE)[0] == "--new 3 --new 3".split()
    with pytest.raises(ThreestepError) as told:
        translated("--new 3 --other 4".split(), MORE)
    assert str(told.value) == ("--new 3 and --new 4 (as --other is read) contradict each other; leave one of them out")
    with pytest.raises(ThreestepError, match="^--never is not built$"):
        translated(["--never"], MORE)
