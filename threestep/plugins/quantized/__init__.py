"""Base weights in 4 and 8 bits under LoRA, and models whose files hold such weights."""

from training.utils.plugins.plugin import EVERY_STEP, Hooks, Plugin

PLUGIN = Plugin(
    "quantized",
    "4-bit and 8-bit base weights under LoRA, and models that are stored quantized",
    needs=("lora",),
    flags={EVERY_STEP: (f"{__name__}.arguments:QuantizationArguments",)},
    tables={
        "stored_forms": {"quantization_config": f"{__name__}.folders:QuantizedFolder"},
        "packed_layers": {"quantized": f"{__name__}.layers:quantize_described"},
        "meant_flags": {"quantization_bit": ("load_in_4bit",)},
    },
    hooks=Hooks(check=f"{__name__}.checks:check", preparers=f"{__name__}.preparers:preparers"),
)
