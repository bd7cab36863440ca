"""The public interface of Threestep: the console command `threestep` and Python functions. `training` does the work.

    result = threestep.sft("Qwen/Qwen3-0.6B-Base", [{"prompt": "2 + 2 =", "completion": " 4"}, ...])

Importing this package imports nothing, not even `training`: only where that is a module of the user's, it sees to it
that both are found (`apart`).
"""

from __future__ import annotations

import os
import sys

# `python -m` puts the current folder first, where a random.py or queue.py would stand for Python's. It goes to the end,
# before anything is imported: modules of the user's are found there.
_HERE = sys.path[0] if sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False) else None
if _HERE is not None and os.path.realpath(_HERE) != os.path.dirname(os.path.dirname(os.path.realpath(__file__))):
    sys.path.append(sys.path.pop(0))

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from threestep.own_package import keep_apart, loaded_name  # noqa: E402

if TYPE_CHECKING:
    from threestep import audit
    from threestep.training_calls import Result, ThreestepError, dpo, evaluate, grpo, new_model, ppo, reward, rloo, sft
    from training import __version__

__all__ = ["Result", "ThreestepError", "__version__", "audit", "dpo", "evaluate", "grpo", "new_model", "ppo", "reward",
           "rloo", "sft"]  # fmt: skip


keep_apart(_HERE)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        calls = [each for each in ("sft", "reward", "dpo", "ppo", "grpo", "rloo") if name.lower().startswith(each)]
        advice = f"call threestep.{calls[0]}(model, rows, ...)" if calls else f"it has {', '.join(__all__)}"
        caller = sys._getframe(1)
        # Python drops the words of an AttributeError in `from threestep import name`.
        is_import = caller.f_code.co_code[caller.f_lasti] == importlib.import_module("dis").opmap["IMPORT_FROM"]
        mistake = ImportError if is_import else AttributeError
        raise mistake(f"module 'threestep' has no attribute '{name}'; {advice}")
    if name == "audit":
        return importlib.import_module("threestep.audit")
    home = importlib.import_module(loaded_name("training") if name == "__version__" else "threestep.training_calls")
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__
