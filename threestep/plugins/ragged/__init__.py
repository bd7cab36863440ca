"""Rows that a transformers model decodes side by side, each at its own pace: they join, leave, and are given several
tokens at once."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin("ragged", "rows that are decoded at their own pace, for other plugins")
