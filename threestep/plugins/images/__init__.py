"""Images in rows, prompts and conversations: read from data, shown to models that see, kept beside samples."""

from training.utils.plugins.plugin import EVERY_STEP, Plugin

PLUGIN = Plugin(
    "images",
    "rows with images",
    needs=("embedded", "serving"),
    flags={
        EVERY_STEP: (f"{__name__}.flags:ImageArguments",),
        **dict.fromkeys(("rows", "rollouts", "answers"), (f"{__name__}.flags:ImageRowArguments",)),
    },
    tables={
        "media": {"images": f"{__name__}.kind:Images"},
        "data_sources": {"shapes": f"{__name__}.data.shapes:ShapesDataset"},
    },
)
