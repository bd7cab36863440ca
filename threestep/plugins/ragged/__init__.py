"""Rows that a transformers model decodes side by side, each at its own pace: they join, leave, and are given several
tokens at once."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin("ragged", "generation in which each row advances at its own pace, for other plugins")
