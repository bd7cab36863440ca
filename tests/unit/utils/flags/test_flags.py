"""Flags as fields: what each takes, and what it says of other values; settings made of the flags of the same names."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.arguments import may_change_in, parse_arguments
from training.utils.flags.flags import flag, flag_of, flags_of, nearest_flags, note_mistakes, settings_of, without_flags


@dataclass
class OwnArguments:
    """A group."""

    count: int = flag(1, "A count.", "number >= 1")
    rate: float | None = flag(None, "A rate.", "rate > 0")
    share: float = flag(0.0, "A share.", "0 <= share < 1")
    mass: float = flag(1.0, "A mass.", "0 < number <= 1")
    color: str = flag("red", "A color.", choices=("red", "blue"))
    places: list[int] = flag([2], "Places.", "number >= 1", aliases=["--spots"])
    free: str = flag("", "Anything.")

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(self.free != "no", "--free expects anything but no")


@dataclass
class BothArguments:
    """Groups in a group."""

    own: OwnArguments = field(default_factory=OwnArguments)


def sentences_of(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(BothArguments(OwnArguments(**given)), mistakes)
    return mistakes.sentences


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"count": 0}, "--count expects 1 or more, got 0"),
        ({"rate": 0.0}, "--rate expects more than 0, got 0.0"),
        ({"rate": float("nan")}, "--rate expects more than 0, got nan"),
        ({"share": 1.0}, "--share expects 0 or more and less than 1, got 1.0"),
        ({"mass": 1.5}, "--mass expects more than 0 and at most 1, got 1.5"),
        ({"color": "rad"}, "--color expects one of red, blue, got 'rad'; did you mean 'red'?"),
        ({"places": [3, 0]}, "--places expects 1 or more, got 0"),
        ({"free": "no"}, "--free expects anything but no"),
    ],
)
def test_a_value_that_a_flag_does_not_take(given, sentence):
    assert sentences_of(**given) == [sentence]


@pytest.mark.parametrize(
    ("takes", "unit", "values"),
    [
        ("model", "model", "None"),
        ("a,b,c", "a,b,c", "None"),
        ("tokens >= 1", "tokens", "1 or more"),
        ("1 < ratio", "ratio", "more than 1"),
        ("0 <= share <= 1", "share", "a number from 0 to 1"),
    ],
)
def test_what_a_flag_counts_and_its_range_are_one_text(takes, unit, values):
    metadata = flag(1, "A flag.", takes).metadata
    assert (metadata["unit"], str(metadata["values"])) == (unit, values)
    with pytest.raises(AssertionError, match=f"expected a unit, alone or in a range .*, got '{takes} <'"):
        flag(1, "A flag.", f"{takes} <")


def test_the_ends_of_a_range_and_none_and_the_defaults():
    assert sentences_of() == []
    assert sentences_of(count=1, rate=1e-9, share=0.0, mass=1.0, places=[1], color="blue") == []


def test_a_default_list_is_not_shared():
    OwnArguments().places.append(3)
    assert OwnArguments().places == [2]


def test_the_command_line():
    (own,) = parse_arguments((OwnArguments,), ["--count", "3", "--spots", "4", "5"], "")
    assert (own.count, own.places) == (3, [4, 5])
    with pytest.raises(ThreestepError, match="--count expects 1 or more, got 0\n.*--color expects one of red, blue"):
        parse_arguments((BothArguments,), ["--count", "0", "--color", "green"], "")


@dataclass(frozen=True)
class Settings:
    rate: float
    path: str = "none"
    depth: int = 3


def test_a_field_is_the_flag_of_its_name_or_named_as_given_or_left_at_its_default():
    flags = SimpleNamespace(rate=0.5, width=7)
    assert settings_of(Settings, flags, defaults=("path", "depth")) == Settings(0.5)
    assert settings_of(Settings, flags, rate=0.1, path="x", defaults=("depth",)) == Settings(0.1, "x")


def test_no_field_is_left_at_its_default_in_silence():
    renamed = SimpleNamespace(rate=0.5, paths="x", depth=4)
    with pytest.raises(AssertionError, match=r"Settings\.path: no flag of SimpleNamespace has this name"):
        settings_of(Settings, renamed)
    with pytest.raises(AssertionError, match=r"Settings\.depth: a flag, not its default"):
        settings_of(Settings, renamed, defaults=("path", "depth"))
    with pytest.raises(TypeError, match="width"):
        settings_of(Settings, renamed, width=7, defaults=("path",))
    with pytest.raises(AssertionError, match="Settings has no paths"):
        settings_of(Settings, renamed, defaults=("paths",))


def test_the_flag_of_a_role_goes_before_that_of_all():
    flags = SimpleNamespace(actor_rate=0.5, rate=0.25, path="all", critic_path="its", depth=3)
    assert settings_of(Settings, flags, "actor") == Settings(0.5, "all")
    assert settings_of(Settings, flags, "critic") == Settings(0.25, "its")


@dataclass
class TwoArguments(
    make_dataclass("TwoFlags", flags_of(OwnArguments, {"mass": "ROLE's mass."}, ("a", "b"), topic="loss"))
):
    """Flags that another group declares."""

    count: int = flag_of(OwnArguments, default=4)
    share: float = flag_of(OwnArguments, "Another share.", takes="0 <= share < 0.5")
    shade: str = flag_of(OwnArguments, name="color", choices=("red", "pink"))
    places: list[int] = flag_of(OwnArguments, aliases=())


def test_a_flag_of_another_group_with_what_differs_here():
    fields = TwoArguments.__dataclass_fields__
    assert list(fields) == ["a_mass", "b_mass", "count", "share", "shade", "places"]
    assert TwoArguments() == TwoArguments(1.0, 1.0, 4, 0.0, "red", [2])
    told = {name: field.metadata for name, field in fields.items()}
    assert [each["help"] for each in told.values()] == [
        "a's mass.", "b's mass.", "A count.", "Another share.", "A color.", "Places.",
    ]  # fmt: skip
    assert str(told["b_mass"]["values"]) == "more than 0 and at most 1" and told["b_mass"]["topic"] == "loss"
    assert str(told["share"]["values"]) == "0 or more and less than 0.5" and told["shade"]["values"] == ("red", "pink")
    assert "aliases" not in told["places"] and "aliases" in OwnArguments.__dataclass_fields__["places"].metadata
    TwoArguments().places.append(3)
    assert TwoArguments().places == [2]


@dataclass
class FreeArguments:
    """Flags that a resumed run may change, all of them."""

    may_change: ClassVar[bool] = True

    color: str = flag("red", "A color.")


@dataclass
class MixedArguments:
    rate: float = flag(0.5, "A rate.")
    steps: int = flag(1, "Steps.", may_change=True)


def test_the_flags_that_a_resumed_run_may_change():
    assert may_change_in((FreeArguments, MixedArguments, BothArguments)) == {"color", "steps"}


def test_a_group_without_flags_has_their_defaults():
    smaller = without_flags(BothArguments, ["count", "places"])
    (both,) = parse_arguments([smaller], ["--rate", "2"], "")
    assert isinstance(both, BothArguments) and isinstance(both.own, OwnArguments)
    assert (both.own.count, both.own.places, both.own.rate) == (1, [2], 2.0)
    with pytest.raises(ThreestepError, match="unknown flag --count"):
        parse_arguments([smaller], ["--count", "2"], "")
    with pytest.raises(ThreestepError, match="--free expects anything but no"):
        parse_arguments([smaller], ["--free", "no"], "")
    assert without_flags(BothArguments, ["other"]) is BothArguments


OF_A_STEP = ["learning_rate", "num_train_epochs", "gradient_accumulation_steps", "output_dir", "eval_interval"]


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("learning_rat", "learning_rate"),
        ("output-dir", "output_dir"),
        ("accumulation_steps", "gradient_accumulation_steps"),
        ("train_epochs", "num_train_epochs"),
    ],
)
def test_the_nearest_comes_first(typed, first):
    assert nearest_flags(typed, OF_A_STEP).startswith(f"; did you mean '{first}'")


def test_nothing_is_suggested_for_what_resembles_nothing():
    assert nearest_flags("qqqq", OF_A_STEP) == ""
