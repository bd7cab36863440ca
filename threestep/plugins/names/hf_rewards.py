"""TRL's names of reward functions, as --reward takes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import GIVEN

_MODEL = "model"
_TRUTH = ("--reference_column", "solution")  # the column that accuracy_reward reads
_THINKS = r"(?s)\A<think>(?!.*<think>).*</think>"
# By TRL's name: ours, and the flags that it needs.
_FUNCTIONS = {
    "accuracy_reward": ("math", _TRUTH),
    "think_format_reward": ("regex", ("--reward_regex", _THINKS)),
}
_WITHOUT = {
    "reasoning_accuracy_reward": (
        "math reads the whole response; your own function can strip the model's thinking first"
    ),
    "get_soft_overlong_punishment": (
        "use --overlong_buffer_tokens and --overlong_penalty, which subtract a penalty from the reward"
    ),
}
_IS_A_MODEL = "for a reward model, use --reward_model_name_or_path"


def reward_words(value: str, given: Mapping[str, str]) -> list[str]:
    """--reward_funcs and their --reward_weights as --reward; a reward model that is given scores first, as in TRL."""
    names = value.replace(",", " ").split()
    ours: list[str] = [_MODEL] if given.get("--reward_model_name_or_path") else []
    more: list[str] = []
    for name in names:
        rule, flags = _function(name)
        ours.append(rule)
        more += [word for word in flags if flags[0] not in given and flags[0] not in more[::2]]
    weights = given.get("--reward_weights", "").replace(",", " ").split() or ["1"] * len(ours)
    if len(weights) != len(ours):
        raise ThreestepError(
            f"--reward_weights expects one number for each of {', '.join(ours)}, got {' '.join(weights)}; give one "
            "number per reward"
        )
    return ["--reward", ",".join(f"{name}:{weight}" for name, weight in zip(ours, weights, strict=True)), *more]


def weight_words(value: str, given: Mapping[str, str]) -> str:
    """--reward_weights, which are read with the functions."""
    if "--reward_funcs" not in given:
        raise ThreestepError(
            f"--reward_weights {value} needs --reward_funcs; or write the weights as --reward NAME:WEIGHT"
        )
    return "the weights are given in --reward"


def _function(name: str) -> tuple[str, tuple[str, ...]]:
    """Ours for one of TRL's, or for a function of the user's by its dotted path."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name in _WITHOUT:
        raise ThreestepError(f"--reward_funcs {name} has no equivalent here: {_WITHOUT[name]}")
    if ".py:" in name or name.startswith(GIVEN):
        return name, ()
    module, _, function = name.rpartition(".")
    file = Path(*module.split(".")).with_suffix(".py") if module and "/" not in name else None
    if file is None:
        raise ThreestepError(
            f"--reward_funcs expects {', '.join(_FUNCTIONS)}, or your own function as MODULE.NAME or FILE.py:NAME, "
            f"got '{name}'; {_IS_A_MODEL}"
        )
    if not file.is_file():
        raise ThreestepError(
            f"--reward_funcs {name} needs the file {file}, which does not exist here; give your function as "
            "FILE.py:NAME"
        )
    return f"{file.as_posix()}:{function}", ()
