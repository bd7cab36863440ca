"""Images in rows, prompts and conversations: read from data, shown to models that see, kept beside samples."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin("images", "rows with images", tables={"media": {"images": f"{__name__}.kind:Images"}})
