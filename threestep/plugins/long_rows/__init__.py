"""Rows split across ranks (Ulysses): each computes a slice of every row and, in attention, a share of the heads."""

from training.utils.plugins.plugin import EVERY_STEP, Hooks, Plugin

_FLAG = ("sequence_parallel_size",)

PLUGIN = Plugin(
    "long_rows",
    "rows split across several ranks, in every step",
    flags={EVERY_STEP: (f"{__name__}.arguments:LongRowsArguments",)},
    tables={
        "row_sharing": dict.fromkeys(_FLAG, f"{__name__}.sharing:asked"),
        "meant_flags": dict.fromkeys(
            ("context_parallel_size", "ring_attn_size", "sp_size", "ulysses_sequence_parallel_size"), _FLAG
        ),
    },
    hooks=Hooks(check=f"{__name__}.checks:check", step_needs=f"{__name__}.checks:step_needs"),
)
