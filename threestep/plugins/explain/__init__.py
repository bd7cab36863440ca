"""The explanation of one optimizer step, token by token, from its record: `threestep audit explain`."""

from training.utils.plugins.plugin import EVERY_STEP, Command, Hooks, Plugin, RunFile

PLUGIN = Plugin(
    "explain",
    "what one optimizer step did, token by token",
    needs=("audit", "report"),
    commands={
        "audit explain": Command(
            "threestep.plugins.explain",
            "see what one optimizer step did, token by token, also under other rules",
            earlier="explain",
        )
    },
    flags={EVERY_STEP: (f"{__name__}.flags:ExplainArguments",)},
    tables={"run_files": {"explained/": RunFile(is_result=True)}},
    hooks=Hooks(
        check=f"{__name__}.flags:check",
        step_needs=f"{__name__}.flags:step_needs",
        at_end=f"{__name__}.at_end:explain_at_end",
    ),
)
