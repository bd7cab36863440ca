"""Inspection of data before any training: an account of data sources, the rows that a model is fed, and their cache."""

from training.utils.plugins.plugin import Command, Plugin

PLUGIN = Plugin(
    "inspect",
    "what data are taken for, and the rows that come of them",
    needs=("pretraining_loss", "report"),
    commands={
        "preview": Command(f"{__name__}.preview", "the rows of a run, as a model is fed them"),
        "inspect": Command(__name__, "what data are taken for, before training"),
        "cache": Command(f"{__name__}.cache", "the builds in a cache of tokenized data: list, verify, prune"),
    },
)
