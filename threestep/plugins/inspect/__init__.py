"""Inspection of data before any training: an account of data sources, the rows that a model is fed, and their cache."""

from training.utils.plugins.plugin import Command, Plugin

PLUGIN = Plugin(
    "inspect",
    "how your data is read, and the rows it becomes",
    needs=("pretraining_loss", "report"),
    commands={
        "inspect": Command(__name__, "show how your data will be read, before training"),
        "inspect preview": Command(f"{__name__}.preview", "show the rows that a model is given", earlier="preview"),
        "inspect cache": Command(f"{__name__}.cache", "list, verify or prune cached tokenized data", earlier="cache"),
    },
)
