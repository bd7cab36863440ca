"""Reward functions of users: those called as TRL calls them, and the check before a run that the rows have the
columns that functions name.

TRL calls `reward(completions, **columns)`, prompts among the columns, every argument by its name. Of rows whose prompt
is a conversation, prompts and completions are lists of messages. A function is one of these if it has a parameter
`completions` and none named `responses`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.rewards.calling import MESSAGES
from training.utils.rewards.rules import exact_match_reward, gsm8k_reward, math_rule, numbers_of, truths_of

if TYPE_CHECKING:
    from training.utils.contracts.rows import PromptRow
    from training.utils.rewards.calling import Rule


# What TRL 1.16 hands to functions besides, and what to write without it.
_WITHOUT = {
    "completion_ids": "use completions and tokenize them",
    "completions_ids": "use completions and tokenize them",
    "prompt_ids": "use prompts, or --return_columns raw_prompt_ids",
    "trainer_state": "follow the run with a callback (step, figures)",
    "log_extra": "return (scores, {name: one number per response})",
    "log_metric": "return (scores, {name: one number per response})",
    "environments": "use --environment, which gives rewards itself",
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def takes_completions(function: Callable[..., Any]) -> bool:
    """True if a function is called as TRL calls it."""
    names = _parameters(function)
    return "completions" in names and "responses" not in names


class CompletionsRule:
    """Such a function as a rule, which is called with (prompts, responses, **columns).

    name: of the reward, for errors. ThreestepError for an argument that only TRL has.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        parameters = _parameters(function)
        self._takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._names = {name for name, each in parameters.items() if each.kind in _NAMED}
        self._needed = {name for name in self._names if parameters[name].default is inspect.Parameter.empty}
        for argument, remedy in _WITHOUT.items():
            if argument in self._needed:
                raise ThreestepError(
                    f"reward function '{name}' expects the argument {argument}, which only TRL passes; {remedy}, and "
                    f"remove {argument} or give it a default"
                )

    @property
    def needed_columns(self) -> set[str]:
        """The columns without which the function cannot be called."""
        return self._needed - {"prompts", "completions"}

    def __call__(self, prompts: list[str], responses: list[str], **columns: Any) -> Any:
        messages = columns.pop(MESSAGES, None) or [None] * len(prompts)
        given = {
            **columns,
            "prompts": [text if own is None else own for text, own in zip(prompts, messages, strict=True)],
            "completions": [
                text if own is None else [{"role": "assistant", "content": text}]
                for text, own in zip(responses, messages, strict=True)
            ],
        }
        lacking = sorted(self._needed - given.keys())
        if lacking:
            raise ThreestepError(
                f"reward function '{self._name}' expects the columns {', '.join(lacking)}, but the rows have "
                f"{', '.join(sorted(columns))}; a column that a format reads as the response or the reference is not "
                "passed on: use another column, or ground_truth"
            )
        if not self._takes_all:
            given = {name: value for name, value in given.items() if name in self._names}
        return self._function(**given)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a built-in function
        return {}


_TRUTH = "ground_truth"
_OURS = "training."  # modules of the named rules
_MADE = ("data_source", "drawn_turns")  # columns that no row holds


def _source(rule: Any) -> tuple[str, str]:
    """Return the module of a rule, and the name there of its function or of the function that made it."""
    return getattr(rule, "__module__", ""), getattr(rule, "__qualname__", "").partition(".")[0]


# By the source of a named rule: what it looks for in a reference, and the search.
_READERS: dict[tuple[str, str], tuple[str, Callable[[Any], Sequence[Any]]]] = {
    _source(gsm8k_reward): ("number", numbers_of),
    _source(exact_match_reward): ("text or number", truths_of),
    _source(math_rule): ("text or number", truths_of),
}


def check_columns(
    rules: Mapping[str, Rule],
    columns: Collection[str],
    rows: Sequence[Iterable[PromptRow]],
    say: Callable[[str], None] = log_on_main,
) -> None:
    """ThreestepError for a rule that names a column which the rows lack: without it every response would be scored by
    None; and for a named rule that can read no row's reference. A function of the user that takes `ground_truth`, as
    documented, may not read it: a warning.

    rules: by the name in the error. columns: that any row carries, and those of its media. rows: to train on, and
    others. say: prints a warning
    """
    known = {*columns, *_MADE}
    shown = ", ".join(f"'{name}'" for name in sorted(columns) if name != "data_source") or "none"
    for name, rule in rules.items():
        needed = needed_columns(rule)
        lacking = sorted(needed - known - {_TRUTH})
        if lacking:
            raise ThreestepError(
                f"reward function '{name}' expects the column{'s' * (len(lacking) > 1)} {', '.join(lacking)}, but the "
                f"columns passed to rewards are {shown}{nearest_names(lacking[0], columns)}; columns read as the "
                f"prompt or the response are not passed, and the reference is passed as {_TRUTH}"
            )
        if _TRUTH in needed and all(row.reference is None for part in rows for row in part):
            sentence = f"reward function '{name}' expects {_TRUTH}, but no row has one; " + (
                "no columns are passed to rewards: name the reference column, such as --reference_column answer"
                if shown == "none"
                else f"the columns passed to rewards are {shown}: use one of these, or name the reference column "
                "with --reference_column"
            )
            if isinstance(rule, CompletionsRule) or getattr(rule, "__module__", "").startswith(_OURS):
                raise ThreestepError(sentence)
            say(f"warning: {sentence}; it receives None")
        else:
            unread = _unread_references(name, rule, rows)
            if unread is not None:
                say(f"warning: {unread}; their responses get no score")


def _unread_references(name: str, rule: Rule, rows: Sequence[Iterable[PromptRow]]) -> str | None:
    """Return how many rows' references a named rule cannot read; None for no row. ThreestepError for all of them."""
    if _source(rule) not in _READERS:
        return None
    what, read = _READERS[_source(rule)]
    count, unread, first = 0, 0, None
    for row in (row for part in rows for row in part):
        count += 1
        if not read(row.reference):
            unread, first = unread + 1, first or row
    if first is None:
        return None
    sentence = (
        f"reward function '{name}' finds no {what} in the reference of {unread:,} of {count:,} rows, the first in "
        f"row {first.row_id}: {first.reference!r:.80}"
    )
    if unread == count:
        raise ThreestepError(f"{sentence}; name the reference column with --reference_column")
    return sentence


def needed_columns(rule: Rule) -> set[str]:
    """The columns without which a rule cannot be called."""
    if isinstance(rule, CompletionsRule):
        return rule.needed_columns
    parameters = _parameters(rule).values()
    by_place = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = [*by_place[2:], *(each for each in parameters if each.kind is each.KEYWORD_ONLY)]
    return {each.name for each in named if each.default is each.empty}
