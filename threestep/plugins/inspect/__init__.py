"""Inspection of data before any training: an account of data sources, the rows that a model is fed, and their cache."""

from training.utils.plugins.plugin import Command, Plugin

PLUGIN = Plugin(
    "inspect",
    "how data are read, and the rows they become",
    needs=("pretraining_loss", "report"),
    commands={
        "inspect": Command(__name__, "how your data will be read, before training"),
        "inspect preview": Command(f"{__name__}.preview", "the rows that a model is given", earlier="preview"),
        "inspect cache": Command(f"{__name__}.cache", "cached tokenized data: list, verify, prune", earlier="cache"),
    },
)
