"""Models in GGUF files, llama.cpp's format, read as models to start from."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin(
    "gguf",
    "models in GGUF files as models to start from",
    tables={"model_files": {".gguf": f"{__name__}.files:as_folder"}},
)
