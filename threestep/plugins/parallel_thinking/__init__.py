"""Parallel thinking: responses with blocks of paths that do not see each other, trained and drawn so."""

from training.utils.plugins.plugin import Hooks, Plugin, RowFormEntry

PLUGIN = Plugin(
    "parallel_thinking",
    "responses with parallel paths that cannot see each other, trained and generated side by side",
    needs=("ragged",),
    flags={
        "rows": (f"{__name__}.arguments:ParallelArguments",),
        "rollouts": (f"{__name__}.arguments:ParallelRolloutArguments",),
        "answers": (f"{__name__}.arguments:ParallelAnswerArguments",),
        "chat": (f"{__name__}.arguments:ParallelChatArguments",),
    },
    tables={
        "row_forms": {
            "parallel_tags": RowFormEntry(f"{__name__}.layout:ParallelTags", f"{__name__}.form:parallel_form")
        }
    },
    hooks=Hooks(
        check=f"{__name__}.checks:check_beside_paths",
        step_needs=f"{__name__}.checks:needs_of_paths",
    ),
)
