"""Long rows with facts far back, and a question about one of them, made by code."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin(
    "needle",
    "generated long rows with facts far back, to test training at any length",
    needs=("embedded",),
    tables={"data_sources": {"needle": f"{__name__}.needle:NeedleDataset"}},
)
