"""Multi-token prediction: a head that predicts further tokens, its training, and its folder."""

from training.utils.plugins.plugin import Hooks, Plugin, ProgramHooks

PLUGIN = Plugin(
    "mtp",
    "a multi-token-prediction head, trained beside a model or jointly with it",
    flags={
        "step1_sft": (f"{__name__}.arguments:SftMtpArguments",),
        "step3_ppo": (f"{__name__}.arguments:MtpArguments",),
    },
    tables={"evaluated_figures": {"mtp_*": ("step1_sft",)}},
    hooks=Hooks(
        check=f"{__name__}.feature:check_head",
        guests=f"{__name__}.feature:head_of",
    ),
    program_hooks=ProgramHooks(exported=f"{__name__}.exported:write_trained_head"),
)
