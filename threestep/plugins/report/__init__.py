"""Pages about runs: curves, samples, time, settings; a card for each model, the hub, and services that show figures."""

from training.utils.plugins.plugin import EVERY_STEP, Command, Hooks, Plugin, ProgramHooks, RunFile, TrackerEntry

PLUGIN = Plugin(
    "report",
    "a page about each run, a model card, uploads to the hub, and experiment trackers",
    needs=("serving",),
    commands={"report": Command(__name__, "write a page about one run or several")},
    flags={EVERY_STEP: (f"{__name__}.arguments:ReportArguments",)},
    tables={
        "trackers": {
            "wandb": TrackerEntry(f"{__name__}.trackers.wandb:WeightsAndBiases", "wandb"),
            "trackio": TrackerEntry(f"{__name__}.trackers.trackio:Trackio", "trackio"),
            "mlflow": TrackerEntry(f"{__name__}.trackers.mlflow:MLflow", "mlflow"),
        },
        "meant_flags": dict.fromkeys(("use_wandb", "wandb", "wandb_project"), ("report_to",)),
        "run_files": {"report.html": RunFile()},
        "logs": {"warnings.jsonl": "warnings of a run that ended"},
        "whole_run_switches": {"report": "false: write no report.html at the end of the run and of each step"},
    },
    hooks=Hooks(
        at_start=f"{__name__}.hub:open_repository",
        evaluation_observer=f"{__name__}.gaming.watch:open_watch",
        at_end=f"{__name__}.writing:end_run",
    ),
    program_hooks=ProgramHooks(
        at_export=f"{__name__}.card:card_of_export", at_end_of_all=f"{__name__}.writing:end_whole_run"
    ),
)
