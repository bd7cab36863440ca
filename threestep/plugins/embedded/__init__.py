"""The embedded task: small jobs on words and digits, made by code and checked exactly."""

from training.utils.plugins.plugin import Plugin, RewardEntry

PLUGIN = Plugin(
    "embedded",
    "a generated task with a checker, on which a model with random weights learns in minutes",
    tables={
        "data_sources": {"embedded": f"{__name__}.task:EmbeddedDataset"},
        "rewards": {
            "embedded": RewardEntry(
                f"{__name__}.reward:embedded_rule",
                name=f"{__name__}.reward:logged_name",
                form="embedded",
                note="the checker of --data_path embedded",
            )
        },
    },
)
