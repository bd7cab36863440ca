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
from training.utils.plugins.registry import added
from training.utils.rewards.calling import MESSAGES
from training.utils.rewards.rules import exact_match_reward, gsm8k_reward, math_rule, numbers_of, truths_of

if TYPE_CHECKING:
    from training.utils.contracts.rows import PromptRow
    from training.utils.rewards.calling import Rule

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def takes_completions(function: Callable[..., Any]) -> bool:
    """True if a function is called as TRL calls it."""
    names = _parameters(function)
    return "completions" in names and "responses" not in names


class CompletionsRule:
    """Such a function as a rule, which is called with (prompts, responses, **columns)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = _parameters(function)
        self._takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._names = {name for name, each in parameters.items() if each.kind in _NAMED}
        self.needed_columns = _required(function) - {"prompts", "completions"}

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
        if not self._takes_all:
            given = {name: value for name, value in given.items() if name in self._names}
        return self._function(**given)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a built-in function
        return {}


def _required(function: Callable[..., Any]) -> set[str]:
    return {name for name, each in _parameters(function).items() if each.kind in _NAMED and each.default is each.empty}


def checked_rule(name: str, rule: Callable[..., Any], columns: Iterable[str] = ()) -> Callable[..., Any]:
    """Return the rule; ThreestepError if it cannot be called with prompts, responses, every row's columns and these."""
    needed = rule.needed_columns if isinstance(rule, CompletionsRule) else _required(rule)
    for argument, sentence in added("reward_arguments", ()).items():
        if argument in needed and argument not in columns:
            why = sentence.replace("NAME", name)
            raise ThreestepError(f"reward function '{name}' expects the argument {argument}, {why}")
    try:
        inspect.signature(rule).bind_partial([], [], **dict.fromkeys((_TRUTH, "data_source", *columns)))
    except TypeError as error:
        raise ThreestepError(
            f"reward function '{name}' cannot be called with (prompts, responses, **columns): {error}; begin it "
            f"with `def {name}(prompts, responses, *, {_TRUTH}, **columns):`"
        ) from error
    except ValueError:  # some built-in functions have no signature
        pass
    return rule


_TRUTH = "ground_truth"


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
    None; and for a named rule that can read no row's reference. Rows whose reference it cannot read are a warning.

    rules: by the name in the error. columns: that any row carries, and those of its media. rows: to train on, and
    others. say: prints a warning
    """
    known = {*columns, "data_source", "drawn_turns"}
    shown = ", ".join(f"'{name}'" for name in sorted(columns) if name != "data_source") or "none"
    for name, rule in rules.items():
        needed = needed_columns(checked_rule(name, rule, columns))
        lacking = sorted(needed - known - {_TRUTH})
        if lacking:
            raise ThreestepError(
                f"reward function '{name}' expects the column{'s' * (len(lacking) > 1)} {', '.join(lacking)}, but the "
                f"columns passed to rewards are {shown}{nearest_names(lacking[0], known)}; columns read as the "
                f"prompt or the response are not passed, and the reference is passed as {_TRUTH}"
            )
        if _TRUTH in needed and all(row.reference is None for part in rows for row in part):
            raise ThreestepError(
                f"reward function '{name}' expects {_TRUTH}, but no row has one; the columns passed to rewards are "
                f"{shown}: {'' if shown == 'none' else 'use one of these, or '}name the reference column, such as "
                f"--reference_column answer; a function that can do without declares {_TRUTH}=None"
            )
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
    by_place = [name for name, each in _parameters(rule).items() if each.kind in (each.POSITIONAL_ONLY, _NAMED[0])]
    return _required(rule) - {*by_place[:2]}
