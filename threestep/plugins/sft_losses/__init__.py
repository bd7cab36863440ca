"""Regularizers of step 1: noise on embeddings (NEFTune), the z-loss."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin(
    "sft_losses",
    "embedding noise and the z-loss in step 1",
    flags={"step1_sft": (f"{__name__}.arguments:RegularizerArguments",)},
    tables={"sft_regularizers": {"neftune_alpha": f"{__name__}.regularizer:regularizer_of_flags"}},
)
