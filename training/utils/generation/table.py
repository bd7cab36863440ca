"""The table of rollout engines by name, and how a flag's value becomes an engine class.

Cheap to import for `--help`: an engine's module is imported when the engine is selected.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.base.user_files import is_address, load_named

if TYPE_CHECKING:
    from training.utils.contracts.rollout_engine import RolloutEngine

ENGINES = {
    "hf": "training.utils.generation.engines.hf:TransformersRollout",
    "hybrid": "training.utils.generation.engines.hybrid:HybridRollout",
    "vllm": "training.utils.generation.vllm.engine:VllmRollout",
}
# Those whose log-probabilities another program computes: `logprobs_are_trained_models` of their classes is False.
WITH_OTHER_LOGPROBS = ("vllm",)
FLAG = "--rollout_engine"
ENGINES_HELP = (
    f"{', '.join(ENGINES)} (vllm: the package vllm, docs/vllm.md; hybrid: DeepSpeed's engine, in training only), or "
    "your own RolloutEngine as FILE.py:NAME"
)


def engine_class(given: str) -> type[RolloutEngine]:
    """Return the engine of a name or of a FILE.py:NAME; ThreestepError for anything else."""
    from training.utils.contracts.rollout_engine import RolloutEngine

    if is_address(given):
        found = load_named(given, FLAG)
        if not (isinstance(found, type) and issubclass(found, RolloutEngine)):
            raise ThreestepError(f"{FLAG} expects '{given}' to be a subclass of RolloutEngine, got {found!r}")
        return found
    if given not in ENGINES:
        near = nearest_names(given, ENGINES)
        raise ThreestepError(f"{FLAG} expects one of {', '.join(ENGINES)} or FILE.py:NAME, got '{given}'{near}")
    module, _, name = ENGINES[given].partition(":")
    return getattr(importlib.import_module(module), name)


def checked_engine(
    given: str, wanted: Mapping[str, Any], mistakes: Mistakes, draws: bool = True
) -> type[RolloutEngine] | None:
    """Return the engine's class; note an unknown engine (None is returned), a missing package, and each flag of
    `wanted` (min_p, bad_words, stop) that has a value and that the engine does not support. draws: False for a plan,
    for which no package is needed."""
    engine = mistakes.note(engine_class, given)
    if engine is None:
        return None
    if draws:
        mistakes.note(engine.check_installed)
    for flag, value in wanted.items():
        mistakes.require(
            not value or getattr(engine, f"supports_{flag}"),
            f"{FLAG} {given} does not support --{flag}, got {value}; leave it out or use another engine",
        )
    return engine
