"""Flags as fields: what each takes, and what it says of other values; settings made of the flags of the same names;
flags that plugins and entries of tables add; the choices of `auto`; the steps, found by their flags."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import yaml

from tests.support.mistakes import mistakes_of
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.checkpoints.arguments import KEPT_AS_BEGUN
from training.utils.flags import added
from training.utils.flags.added import (
    AddedFlags,
    added_flags,
    flags_of_entries,
    own_options,
    refuse_flags_of_others,
    with_added,
)
from training.utils.flags.arguments import defaults_of, may_change_in, parse_arguments, resolved_settings
from training.utils.flags.flags import (
    AutoChoice,
    chosen_in,
    flag,
    flag_of,
    flags_of,
    marked,
    nearest_flags,
    sentence,
    settings_of,
    without_flags,
)
from training.utils.flags.step import UNKNOWN_STEP, known_steps, step_of

STEPS = known_steps()


@dataclass
class OwnArguments:
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
    """A group in a group."""

    own: OwnArguments = field(default_factory=OwnArguments)


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        ({}, []),
        ({"count": 1, "rate": 1e-9, "share": 0.0, "mass": 1.0, "places": [1], "color": "blue"}, []),
        ({"count": 0}, ["--count expects 1 or more, got 0"]),
        ({"rate": 0.0}, ["--rate expects more than 0, got 0.0"]),
        ({"rate": float("nan")}, ["--rate expects more than 0, got nan"]),
        ({"share": 1.0}, ["--share expects 0 or more and less than 1, got 1.0"]),
        ({"mass": 1.5}, ["--mass expects more than 0 and at most 1, got 1.5"]),
        ({"color": "rad"}, ["--color expects one of red, blue, got 'rad'; did you mean 'red'?"]),
        ({"places": [3, 0]}, ["--places expects 1 or more, got 0"]),
        ({"free": "no"}, ["--free expects anything but no"]),
    ],
)
def test_values_that_a_flag_takes_and_others(given, sentences):
    assert mistakes_of(BothArguments(OwnArguments(**given))) == sentences


@pytest.mark.parametrize(
    ("takes", "unit", "values"),
    [
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
    of_roles = SimpleNamespace(actor_rate=0.5, rate=0.25, path="all", critic_path="its", depth=3)
    assert settings_of(Settings, of_roles, "actor") == Settings(0.5, "all")
    assert settings_of(Settings, of_roles, "critic") == Settings(0.25, "its")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"Settings\.path: no flag of SimpleNamespace has this name"),
        ({"defaults": ("path", "depth")}, r"Settings\.depth: a flag, not its default"),
        ({"width": 7, "defaults": ("path",)}, "width"),
        ({"defaults": ("paths",)}, "Settings has no paths"),
    ],
)
def test_no_field_is_left_at_its_default_in_silence(given, words):
    with pytest.raises((AssertionError, TypeError), match=words):
        settings_of(Settings, SimpleNamespace(rate=0.5, paths="x", depth=4), **given)


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
    own = TwoArguments.__dataclass_fields__
    assert list(own) == ["a_mass", "b_mass", "count", "share", "shade", "places"]
    assert TwoArguments() == TwoArguments(1.0, 1.0, 4, 0.0, "red", [2])
    told = {name: field.metadata for name, field in own.items()}
    assert [each["help"] for each in told.values()] == [
        "a's mass.", "b's mass.", "A count.", "Another share.", "A color.", "Places.",
    ]  # fmt: skip
    assert str(told["b_mass"]["values"]) == "more than 0 and at most 1" and told["b_mass"]["topic"] == "loss"
    assert str(told["share"]["values"]) == "0 or more and less than 0.5" and told["shade"]["values"] == ("red", "pink")
    assert "aliases" not in told["places"] and "aliases" in OwnArguments.__dataclass_fields__["places"].metadata
    for group in (TwoArguments, OwnArguments):  # a default list is not shared
        group().places.append(3)
        assert group().places == [2]


@dataclass
class FreeArguments:
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
    for words, said in ((["--count", "2"], "unknown flag --count"), (["--free", "no"], "--free expects anything but")):
        with pytest.raises(ThreestepError, match=said):
            parse_arguments([smaller], words, "")
    assert without_flags(BothArguments, ["other"]) is BothArguments


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("learning_rat", "; did you mean 'learning_rate'"),
        ("output-dir", "; did you mean 'output_dir'"),
        ("accumulation_steps", "; did you mean 'gradient_accumulation_steps'"),
        ("train_epochs", "; did you mean 'num_train_epochs'"),
        ("qqqq", ""),
    ],
)
def test_the_nearest_comes_first(typed, suggested):
    known = ["learning_rate", "num_train_epochs", "gradient_accumulation_steps", "output_dir", "eval_interval"]
    found = nearest_flags(typed, known)
    assert found.startswith(suggested) and bool(found) == bool(suggested)


# --- flags that plugins add, and those that single entries of a table have


@dataclass
class Shared:
    share: float = flag(0.5, "Share.")


@dataclass
class Further(Shared):
    power: int = flag(2, "Power.")


@dataclass(frozen=True)
class Entry:
    compute: object
    flags: type | None = None


TABLE = {"plain": Entry(abs), "shared": Entry(abs, Shared), "further": Entry(abs, Further)}


@dataclass
class Group(flags_of_entries(TABLE)):  # type: ignore[misc]
    name: str = flag("plain", "Name.")


def test_groups_of_plugins_are_found_by_their_class(monkeypatch):
    """One that a step does not have stands for its defaults."""
    monkeypatch.setattr(added, "flag_groups", {"step1_sft": {"sharing_Shared": Shared}}.__getitem__)
    kind = added_flags("step1_sft")
    flags = kind(sharing_Shared=Shared(0.25))
    assert isinstance(flags, AddedFlags) and flags.of(Shared).share == 0.25
    assert kind().of(Shared) == Shared() and AddedFlags().of(Further) == Further()


def test_a_group_has_the_flags_of_all_entries_once_and_an_entry_reads_its_own():
    assert [field.name for field in fields(Group)] == ["share", "power", "name"]
    given = Group(share=0.1, power=3)
    assert [own_options(entry, given) for entry in TABLE.values()] == [None, Shared(0.1), Further(0.1, 3)]


@pytest.mark.parametrize(
    ("given", "names", "sentences"),
    [
        ({}, ["plain"], []),
        ({"power": 3}, ["further"], []),
        ({"power": 3}, ["plain", "further"], []),
        ({"power": 3}, ["shared"], ["--power 3 applies only to --kind further, not to shared; remove it"]),
        ({"share": 0.1}, ["plain"], ["--share 0.1 applies only to --kind shared or further, not to plain; remove it"]),
    ],
)
def test_flags_of_other_entries_are_refused(given, names, sentences):
    mistakes = Mistakes()
    refuse_flags_of_others(TABLE, names, Group(**given), "kind", mistakes=mistakes)
    assert mistakes.sentences == sentences


def test_plugins_add_records_or_functions(monkeypatch):
    places = {"one": "a:ENTRY", "two": "a:function"}
    monkeypatch.setattr(added, "added", lambda table, own: places if table == "kinds" else {})
    found = SimpleNamespace(ENTRY=Entry(max, Shared), function=min)
    monkeypatch.setattr(added, "named_object", lambda place: getattr(found, place.partition(":")[2]))
    table = with_added("kinds", TABLE, Entry)
    assert table == {**TABLE, "one": Entry(max, Shared), "two": Entry(min)}
    assert with_added("others", TABLE, Entry) == TABLE


# --- what `auto` chose


def test_a_choice_is_named_with_its_reason_and_what_turns_it_off():
    on = [AutoChoice("a", True, "it is faster", off=False), AutoChoice("b", 64, "rows", off=0)]
    assert sentence([*on, AutoChoice("c", 0, "no rows")]) == (
        "auto: --a true (it is faster; false turns it off), --b 64 (rows; 0 turns it off), --c 0 (no rows)"
    )


def test_marks_name_what_was_chosen_and_change_no_value():
    settings = {"a": True, "ab": 0, "data_split": "0,0,1", "text": "two\nlines: 1", "wide": "word " * 40}
    plain = yaml.safe_dump(settings)
    text = marked(plain, ["a", "data_split"])
    assert chosen_in(text) == {"a", "data_split"} and chosen_in(plain) == set()
    assert yaml.safe_load(text) == settings and marked(plain, []) == plain


# --- steps


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_known_by_its_program_and_by_its_flags(name):
    flags = defaults_of(STEPS[name].groups)
    for settings in (flags, {**flags, "of_an_older_version": 1}, {"program": f"training.{name}.main"}):
        assert step_of(settings) is STEPS[name]
    assert STEPS[name].number == name[4]
    # A resumed run leaves out what was chosen for it: left out, a flag is left to the program. One of step 3 never is.
    closed = {"share_beginnings"} if name == "step3_ppo" else set()
    for kept in KEPT_AS_BEGUN.keys() & STEPS[name].defaults.keys() - closed:
        assert STEPS[name].defaults[kept] == KEPT_AS_BEGUN[kept], kept


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"beta": 0.1}, "dpo"),
        ({"center_coef": 0.0}, "reward"),
        ({"actor_model_name_or_path": "x"}, "ppo"),
        ({}, UNKNOWN_STEP.kind),
        ({"seed": 1, "output_dir": "x"}, UNKNOWN_STEP.kind),
        ({"program": "training.a"}, UNKNOWN_STEP.kind),
    ],
)
def test_one_flag_of_its_own_is_enough(settings, kind):
    assert step_of(settings).kind == kind


@pytest.mark.needs_plugin("sft_losses")
def test_a_run_is_named_by_its_method():
    ppo, dpo = step_of({"ppo_epochs": 1}), step_of({"beta": 0.1})
    names = ("gae", "rloo", "my/mine.py:leave_one_out", "given:mine")
    given = ({}, *({"advantage": name} for name in names))
    expected = ["PPO", "PPO", "RLOO", "RL (leave_one_out)", "RL (mine)"]
    assert [ppo.title_of(settings) for settings in given] == expected
    assert [ppo.label_of(settings) for settings in given] == expected
    assert [dpo.label_of({"loss_type": loss}) for loss in ("sigmoid", "kto")] == ["DPO", "DPO (KTO)"]
    assert step_of({"neftune_alpha": 0.0}).title_of({"advantage": "rloo"}) == "supervised fine-tuning"


@pytest.mark.needs_plugin("embedded")
@pytest.mark.parametrize("kind", STEPS)
def test_flags_of_other_steps_are_set_aside(kind, tmp_path, capsys):
    """A file of settings that all steps share, and each flag of it on the command line."""
    step, model = STEPS[kind], next(iter(STEPS[kind].inputs))
    assert step.unread and step.unread == tuple(dict.fromkeys(step.unread))
    assert not step.defaults.keys() & set(step.unread) and step.may_change >= set(step.unread)
    assert all(any(name in other.defaults for other in STEPS.values()) for name in step.unread)
    words = [f"--{model}", "m", "--data_path", "embedded", "--output_dir", "out"]
    words += ["--critic_model_name_or_path", "c"] if kind == "step3_ppo" else []

    def parsed(*more: str) -> dict[str, object]:
        groups = parse_arguments(step.groups, [*more, *words], "", step.old_flags, unread=step.set_aside)
        return resolved_settings(groups)

    plain = parsed()
    capsys.readouterr()
    shared = tmp_path / "shared.yaml"
    shared.write_text("".join(f"{name}: 7\n" for name in step.unread))
    for given in (["--config", str(shared)], [f"--{name}=7" for name in step.unread]):
        assert parsed(*given) == plain
        flags = ", ".join(f"--{name}" for name in step.unread)
        assert capsys.readouterr().out == f"ignored because this step does not use them: {flags}\n"


def test_the_share_of_equal_groups_has_a_chart():
    curves = step_of({"ppo_epochs": 1}).figures.curves
    assert any("rollout/equal_groups" in curve.metrics.values() for curve in curves)
