"""DeepSpeed-Chat's flags that have no namesake here, and their translation.

A step lists its own in its STEP. A flag of DeepSpeed-Chat that is in no table has the same name and meaning here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from training.utils.run.errors import Mistakes, ThreestepError

Words = Callable[[str, Mapping[str, str]], list[str]]


@dataclass(frozen=True)
class Needless:
    """Accepted, without effect.

    why: what is logged
    """

    why: str
    takes_value: bool = True


@dataclass(frozen=True)
class Renamed:
    """Read as a flag of today.

    now: that flag
    note: what else there is to know
    words: the words to read instead, from the value and all flags of the command line; default: `now` with the value
    """

    now: str
    note: str = ""
    takes_value: bool = True
    words: Words | None = None


@dataclass(frozen=True)
class Refused:
    """Refused; `why` names what to use instead."""

    why: str
    takes_value: bool = True


OldFlag = Needless | Renamed | Refused


def translated(argv: Sequence[str], old_flags: Mapping[str, OldFlag]) -> tuple[list[str], list[str]]:
    """Return `argv` in today's flags, and one line for each old flag in it. Raises ThreestepError for refused flags and
    missing values, all at once."""
    mistakes = Mistakes()
    given = _flags_with_values(argv)
    words: list[str] = []
    lines: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, has_equals, value = word.partition("=")
        old = old_flags.get(flag)
        if old is None:
            words.append(word)
            continue
        if old.takes_value and not has_equals:
            if not rest or rest[0].startswith("--"):
                mistakes.add(f"{flag} expects a value after it, got none")
                continue
            value = rest.pop(0)
        if isinstance(old, Refused):
            mistakes.add(f"{flag} {old.why}")
        elif isinstance(old, Needless):
            lines.append(f"{flag} is not needed: {old.why}")
        else:
            new = mistakes.note(old.words, value, given) if old.words else [old.now, value]
            words += new or []
            lines.append(f"{flag} is read as {' '.join(new or [])}" + (f": {old.note}" if old.note else ""))
    mistakes.raise_if_any()
    return words, lines


def old_defaults(
    given: Sequence[str], old_flags: Mapping[str, OldFlag], lines: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What DeepSpeed-Chat's steps take where a command line leaves it out, as words, and a line for each.

    given: the words of the command line, by today's names
    lines: of `translated`; where there are none, nothing says that the command line is DeepSpeed-Chat's
    """
    of_a_step = old_flags.keys() >= OLD_FLAGS.keys()
    if not of_a_step or not lines or any(word.partition("=")[0] == "--data_path" for word in given):
        return [], []
    reason = "DeepSpeed-Chat's default: the command line has flags of its, and names no data"
    return ["--data_path", "Dahoas/rm-static"], [f"--data_path is Dahoas/rm-static, {reason}"]


def _flags_with_values(argv: Sequence[str]) -> dict[str, str]:
    """Each flag with the one word that follows it, "" where another flag follows."""
    found: dict[str, str] = {}
    for word, after in zip(argv, [*argv, "--"][1:], strict=True):
        if word.startswith("--"):
            flag, has_equals, value = word.partition("=")
            found[flag] = value if has_equals else "" if after.startswith("--") else after
    return found


def whole_number(flag: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ThreestepError(f"{flag} expects a whole number, got '{value}'") from None


def no_dropout(role: str = "") -> Renamed:
    """--disable_dropout, of actor or critic with `role`."""
    flag = f"--{role}dropout"
    return Renamed(flag, takes_value=False, words=lambda _value, _given: [flag, "0.0"])


def _end_token(_value: str, given: Mapping[str, str]) -> list[str]:
    token = given.get("--end_of_conversation_token") or given.get("--eot_token") or "<|endoftext|>"
    return ["--end_of_conversation_token", token, "--add_end_of_conversation_token", "true"]


_PADDING = Needless("where a text begins and ends is known from lengths, not from pad tokens")

OLD_FLAGS: dict[str, OldFlag] = {
    "--num_padding_at_beginning": _PADDING,
    "--deepspeed": Needless("every run is DeepSpeed's", takes_value=False),
    "--deepscale": Needless("every run is DeepSpeed's", takes_value=False),
    "--compute_fp32_loss": Needless(
        "losses and log-probabilities are computed in float32 whatever --dtype is", takes_value=False
    ),
    "--enable_tensorboard": Needless("every run writes OUTPUT_DIR/tensorboard", takes_value=False),
    "--tensorboard_path": Needless("the curves are in OUTPUT_DIR/tensorboard, next to the run's other files"),
    "--add_eot_token": Renamed(
        "--end_of_conversation_token TOKEN --add_end_of_conversation_token true",
        "TOKEN is --eot_token's, else <|endoftext|>; it ends every response of every step",
        takes_value=False,
        words=_end_token,
    ),
    "--eot_token": Needless("with --add_eot_token it is read as --end_of_conversation_token, without it has no use"),
}
ONE_MODEL_OLD_FLAGS: dict[str, OldFlag] = {
    **OLD_FLAGS,
    "--deepscale_config": Renamed("--deepspeed_config"),
    "--disable_dropout": no_dropout(),
}
PRINT_LOSS = Needless("the progress bar and metrics.jsonl show the loss of every step", takes_value=False)
# Of the program that scores with a finished reward model, whose tokenizer has what step 2 added.
SCORING_OLD_FLAGS: dict[str, OldFlag] = {
    "--num_padding_at_beginning": _PADDING,
    "--add_eot_token": Renamed(
        "--end_of_conversation_token <|endoftext|>",
        takes_value=False,
        words=lambda _value, _given: ["--end_of_conversation_token", "<|endoftext|>"],
    ),
}
